#!/bin/sh
# Slurm's Prolog, as root on each node. Needed only for mapping files, which list the jobs of each GPU
# (gpumem.conf: GPUMEM_JOB_MAPPING). It always succeeds, because a Prolog that fails drains the node.

conf=${0%/*}/gpumem.conf
[ ! -r "$conf" ] || . "$conf"
mapping=${GPUMEM_JOB_MAPPING:-}
[ -n "$mapping" ] || exit 0
case ${SLURM_JOB_ID:-} in '' | *[!0-9]*) exit 0 ;; esac

PATH=/usr/sbin:/usr/bin:/sbin:/bin
umask 022
mkdir -p "$mapping" 2> /dev/null
IFS=,
for gpu in ${SLURM_JOB_GPUS:-}; do
  case $gpu in '' | *[!0-9]*) continue ;; esac
  # Several jobs may use one GPU and start at the same time.
  timeout 2 flock "$mapping/.lock" sh -c 'grep -qx "$1" "$2" 2> /dev/null || echo "$1" >> "$2"' \
    sh "$SLURM_JOB_ID" "$mapping/$gpu" 2> /dev/null
done
exit 0
