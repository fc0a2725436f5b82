#!/usr/bin/env bash
# launch/recipes/ssh.sh h0,h1,... RUN_DIR FLAGS...: runs launch/pod.py on hosts that ssh reaches by the names by which
# they reach each other. DIRECTORY is the checkout there (by default the one here), PYTHON its interpreter. Ctrl-C and
# SIGTERM end the run on all hosts, with a checkpoint.
set -u
hosts=$1 run_dir=$2
shift 2
directory=${DIRECTORY:-$PWD}
IFS=, read -ra names <<<"$hosts"
connections=()
trap 'kill "${connections[@]}" 2>/dev/null' INT TERM HUP
for index in "${!names[@]}"; do
  command=$(printf '%q ' launch/recipes/again.sh "${PYTHON:-python}" launch/pod.py \
    --hosts "$hosts" --host-index "$index" --run-dir "$run_dir" --resume "$@")
  # With a terminal (-tt) the command gets SIGHUP when the connection ends.
  ssh -tt "${names[index]%%:*}" "cd $(printf %q "$directory") && exec $command" </dev/null &
  connections+=($!)
done
worst=0
for connection in "${connections[@]}"; do
  while kill -0 "$connection" 2>/dev/null; do wait "$connection"; done # a signal cuts a wait short
  wait "$connection"
  code=$?
  if [ "$code" -gt "$worst" ]; then worst=$code; fi
done
exit "$worst"
