#!/usr/bin/env bash
# launch/recipes/again.sh COMMAND...: runs a launcher's command again, up to RESTARTS (100) times, until it is done (0),
# cannot work (2) or was interrupted (130). SIGTERM and SIGHUP are passed on to it and are the end.
set -u
restarts=${RESTARTS:-100}
stopped='' child=''
trap 'stopped=1; kill -TERM "$child" 2>/dev/null' TERM HUP
while :; do
  "$@" &
  child=$!
  wait "$child"
  code=$?
  while [ -n "$stopped" ] && kill -0 "$child" 2>/dev/null; do # the signal has cut the wait short
    wait "$child"
    code=$?
  done
  case $code in 0 | 2 | 130) exit "$code" ;; esac
  if [ -n "$stopped" ] || [ "$restarts" -eq 0 ]; then exit "$code"; fi
  restarts=$((restarts - 1))
  echo "again.sh: ended with $code; starting again" >&2
  sleep "${PAUSE_S:-5}" &
  child=$!
  wait "$child"
  if [ -n "$stopped" ]; then exit 143; fi
done
