#!/usr/bin/env bash
# launch/recipes/notice.sh COMMAND...: runs a command on a machine of Google Cloud, and sends it SIGTERM as soon as the
# metadata server says that the machine is preempted or ends for maintenance, some 30 s before it does; with a machine
# of which that is said already it waits. Where there is no such server it only runs the command. SIGTERM is passed on.
set -u
metadata=${METADATA_URL:-http://metadata.google.internal/computeMetadata/v1/instance}
noticed() {
  said=$(curl -fs -m 2 -H 'Metadata-Flavor: Google' "$metadata/preempted" "$metadata/maintenance-event")
  [[ $said == *TRUE* || $said == *TERMINATE* ]]
}
child='' stopped=''
trap 'stopped=1; kill -TERM "$child" 2>/dev/null' TERM HUP
trap : INT # a terminal's goes to the command too
while noticed; do
  if [ -n "$stopped" ]; then exit 143; fi
  sleep 1
done
"$@" &
child=$!
watch() {
  while kill -0 "$child" 2>/dev/null; do
    if noticed; then
      echo "notice.sh: this machine is about to be taken away" >&2
      kill -TERM "$child"
      return
    fi
    sleep "${POLL_S:-2}"
  done
}
watch &
watcher=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal has cut the wait short
  wait "$child"
  code=$?
done
kill "$watcher" 2>/dev/null
exit "$code"
