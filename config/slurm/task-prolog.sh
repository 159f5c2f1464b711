#!/bin/sh
# Slurm's TaskProlog: puts the agent into the tasks of every job. It runs as the job's user, and what it prints as
# "export NAME=value" is the task's environment. A TaskProlog that fails takes the task with it: this one cannot.
#
# A job that wants none says so: export GPUMEM_DISABLE=1 before sbatch or srun.

conf=${0%/*}/gpumem.conf
[ ! -r "$conf" ] || . "$conf"
library=${GPUMEM_LIBRARY:-/usr/lib/gpumem/current/libgpumem.so}

case ${GPUMEM_DISABLE:-0} in 0) ;; *) exit 0 ;; esac
# Not the link: a job keeps the version that it began with.
library=$(readlink -f "$library" 2> /dev/null)
[ -r "$library" ] || exit 0

# A value ends with its line: one of several lines would be cut, and its rest be read as another order.
say() {
  case $2 in
  *"
"*) ;;
  *) echo "export $1=$2" ;;
  esac
}

# The driver loads one library. Another tool's goes first, and ours hands over to it.
case ${CUDA_INJECTION64_PATH:-} in
'' | */libgpumem.so) ;;
*) say GPUMEM_NEXT_INJECTION64_PATH "$CUDA_INJECTION64_PATH" ;;
esac
say CUDA_INJECTION64_PATH "$library"
# NVTX has one place, and no handing over: another tool's stays.
[ -n "${NVTX_INJECTION64_PATH:-}" ] || say NVTX_INJECTION64_PATH "$library"
# One name for all its processes, on every node: gpumemctl job $SLURM_JOB_ID.
[ -n "${GPUMEM_JOB:-}" ] || [ -z "${SLURM_JOB_ID:-}" ] || say GPUMEM_JOB "$SLURM_JOB_ID"
exit 0
