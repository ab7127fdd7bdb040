#!/usr/bin/env bash
# A run on a node of a Slurm cluster, with one process on each of its GPUs:
#   sbatch configs/slurm.sh configs/vibrent-h100.yaml [-p NAME VALUE]...
#   sbatch --gpus-per-node=8 configs/slurm.sh configs/vibrent-h100.yaml
# Submit it from the repository. A run that was interrupted goes on when the same line is submitted again.
# The batch sizes must be multiples of the number of GPUs; gti plan CONFIG --gpus N says so, and how long it will take.
#SBATCH --job-name=gti
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
[ $# -ge 1 ] || { echo "Which configuration? sbatch configs/slurm.sh configs/vibrent-h100.yaml" >&2; exit 1; }
[ "${SLURM_NNODES:-1}" = 1 ] || { echo "A run is for one node: ask for --nodes=1. (A training alone can use several: see nbs/08b_processes.ipynb)" >&2; exit 1; }
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"

gpus="${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?no GPUs were given: set --gpus-per-node}}"
gpus="${gpus##*:}" # from "h100:4"
config="$1"
shift
export OMP_NUM_THREADS=4
exec .venv/bin/gti run "$config" -p device cuda -p processes "$gpus" "$@"
