#!/bin/sh
# Slurm's TaskProlog: loads the agent into the tasks of every job. It runs as the job's user. Slurm adds its output lines
# "export NAME=value" to the task's environment. It always succeeds, because a TaskProlog that fails ends the task.
#
# To run a job without the agent: export GPUMEM_DISABLE=1 before sbatch or srun.

conf=${0%/*}/gpumem.conf
[ ! -r "$conf" ] || . "$conf"
library=${GPUMEM_LIBRARY:-/usr/lib/gpumem/current/libgpumem.so}

case ${GPUMEM_DISABLE:-0} in 0) ;; *) exit 0 ;; esac
# Resolves the link, so that a job keeps the version with which it began.
library=$(readlink -f "$library" 2> /dev/null)
[ -r "$library" ] || exit 0

# Prints no value of several lines: Slurm would cut it and read the rest as another instruction.
say() {
  case $2 in
  *"
"*) ;;
  *) echo "export $1=$2" ;;
  esac
}

# The driver loads only one library: the agent, which first loads the library of another tool.
case ${CUDA_INJECTION64_PATH:-} in
'' | */libgpumem.so) ;;
*) say GPUMEM_NEXT_INJECTION64_PATH "$CUDA_INJECTION64_PATH" ;;
esac
say CUDA_INJECTION64_PATH "$library"
# NVTX also loads one library, and the agent cannot load another. A library that is already set stays.
[ -n "${NVTX_INJECTION64_PATH:-}" ] || say NVTX_INJECTION64_PATH "$library"
# The same job name for all its processes on every node: gpumemctl job $SLURM_JOB_ID.
[ -n "${GPUMEM_JOB:-}" ] || [ -z "${SLURM_JOB_ID:-}" ] || say GPUMEM_JOB "$SLURM_JOB_ID"
exit 0
