#!/usr/bin/env bash
#SBATCH --job-name=seedx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# sbatch [--nodes N] launch/recipes/slurm.sh RUN_DIR FLAGS..., in the checkout: runs launch/pod.py on the nodes of a job,
# with RUN_DIR on a file system that they share. The job is put into the queue again when it is preempted, comes near its
# time limit (120 s before it), or loses a node, up to RESTARTS (100) times; not when it is done (0) or cannot work (2).
set -u
run_dir=$1
shift
# Jobs that share a node need ports of their own.
port=$((20000 + SLURM_JOB_ID % 10000))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "1s/\$/:$port/" | paste -sd,)
srun --wait 0 "${PYTHON:-python}" launch/pod.py --hosts "$hosts" --run-dir "$run_dir" --resume "$@"
code=$?
case $code in 0 | 2) exit "$code" ;; esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge "${RESTARTS:-100}" ]; then exit "$code"; fi
scontrol requeue "$SLURM_JOB_ID"
