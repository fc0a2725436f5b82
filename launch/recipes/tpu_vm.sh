#!/usr/bin/env bash
# launch/recipes/tpu_vm.sh TPU_NAME ZONE RUN_DIR FLAGS...: runs launch/pod.py on all hosts of a TPU VM slice. DIRECTORY
# is the checkout there (by default ~/seedx), PYTHON its interpreter.
set -euo pipefail
name=$1 zone=$2 run_dir=$3
shift 3
# In the order of the slice's workers; each finds itself by its address.
hosts=$(gcloud compute tpus tpu-vm describe "$name" --zone "$zone" \
  --format 'value(networkEndpoints[].ipAddress)' | tr ';' ,)
command=$(printf '%q ' launch/recipes/again.sh launch/recipes/notice.sh "${PYTHON:-python}" launch/pod.py \
  --hosts "$hosts" --run-dir "$run_dir" --resume "$@")
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker all \
  --command "cd ${DIRECTORY:-seedx} && exec $command"
