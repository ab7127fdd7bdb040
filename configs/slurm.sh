#!/usr/bin/env bash
# A run on a Slurm cluster, with one process on each GPU of one or several nodes:
#   sbatch configs/slurm.sh configs/vibrent-h100.yaml [-p NAME VALUE]...
#   sbatch --nodes=2 --gpus-per-node=8 configs/slurm.sh configs/vibrent-h100.yaml
# Submit it from the repository, on a disk that all nodes share. A run that was interrupted goes on when the same line is submitted
# again. The batch sizes must be multiples of the number of GPUs; gti plan CONFIG --gpus 16 --gpus-per-node 8 says so, and how long it takes.
#SBATCH --job-name=gti
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
[ $# -ge 1 ] || { echo "Which configuration? sbatch configs/slurm.sh configs/vibrent-h100.yaml" >&2; exit 1; }
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"

nodes="${SLURM_NNODES:-1}"
gpus="${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?no GPUs were given: set --gpus-per-node}}"
gpus="${gpus##*:}" # from "h100:4"
config="$1"
shift
export OMP_NUM_THREADS=4
run=(.venv/bin/gti run "$config" -p device cuda -p processes "$((gpus * nodes))" "$@")
[ "$nodes" = 1 ] && exec "${run[@]}"

# Every node gives the same command, and the environment says which one it is. Node 0 leads (nbs/13c_pipeline.ipynb).
export GTI_NODES="$nodes" GTI_MAIN_PORT="$((20000 + SLURM_JOB_ID % 10000))"
GTI_MAIN_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)" # not head, which would end scontrol early
export GTI_MAIN_ADDRESS
# shellcheck disable=SC2016 # SLURM_NODEID is known on the node only
exec srun --ntasks="$nodes" --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 \
    bash -c 'GTI_NODE_RANK="$SLURM_NODEID" exec "$@"' gti "${run[@]}"
