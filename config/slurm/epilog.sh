#!/bin/sh
# Slurm's Epilog, as root on each node: attaches the report to the job. gpumem.conf has its settings. It always ends in time with
# success: an Epilog that fails drains the node, and one that hangs blocks the job's nodes.
#
# Data from the job is never part of a command: ids are digits or empty, and a path is one argument. Files in the user's folder
# are written as the user.

conf=${0%/*}/gpumem.conf
[ ! -r "$conf" ] || . "$conf"
PATH=/usr/sbin:/usr/bin:/sbin:/bin${GPUMEM_PATH:+:$GPUMEM_PATH}
job=${SLURM_JOB_ID:-} uid=${SLURM_JOB_UID:-} gid=${SLURM_JOB_GID:-}
case $job in '' | *[!0-9]*) exit 0 ;; esac
case $uid in *[!0-9]*) uid= ;; esac
case $gid in *[!0-9]*) gid= ;; esac
limit=${GPUMEM_EPILOG_LIMIT:-10}
case $limit in '' | *[!0-9]*) limit=10 ;; esac

# Removes the job from the files to which prolog.sh added it.
unmap() {
  mapping=${GPUMEM_JOB_MAPPING:-}
  [ -d "${mapping:-/nonexistent}" ] || return 0
  timeout 2 flock "$mapping/.lock" sh -c '
    for file in "$2"/[0-9]*; do
      grep -qx "$1" "$file" 2> /dev/null || continue
      grep -vx "$1" "$file" > "$2/.new"
      if [ -s "$2/.new" ]; then cat "$2/.new" > "$file"; else rm -f "$file"; fi
    done
    rm -f "$2/.new"' sh "$job" "$mapping"
}

# Writes the copy as the user, so that a link in the folder can only lead to files that the user may write.
to_folder() {
  [ "${GPUMEM_REPORT_TO_FOLDER:-1}" = 1 ] && [ -n "$uid" ] && [ "$uid" != 0 ] || return 0
  [ -n "${SLURM_JOB_WORK_DIR:-}" ] || return 0
  [ -n "$gid" ] || gid=$(id -g "$uid") || return 0
  setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs \
    sh -c 'set -C; cat > "$1/$2"' sh "$SLURM_JOB_WORK_DIR" "gpumem-$job-$node.txt" < "$1"
}

attach() {
  unmap
  reports=${GPUMEM_REPORTS-/var/spool/gpumem}
  [ -n "$reports" ] || return 0
  node=${SLURMD_NODENAME:-$(uname -n)}
  case $node in *[!A-Za-z0-9._-]*) node=node ;; esac
  umask 077
  mkdir -p "$reports" && chmod 0755 "$reports" || return 0
  new=$reports/.$job.$node
  # The daemon closes the runs some milliseconds after the last process ends, so retry while one is open (20 times at most).
  tries=0
  while gpumemctl report --job "$job" --json | grep -q '"state": *"open"' && [ "$tries" -lt 20 ]; do
    sleep 0.1
    tries=$((tries + 1))
  done
  # A job that used no GPU has no report.
  gpumemctl report --job "$job" > "$new" || { rm -f "$new"; return 0; }
  to_folder "$new"
  [ -z "$uid" ] || chown "$uid" "$new"
  chmod 0400 "$new"
  mv -f "$new" "$reports/$job.$node.txt"
}

# Runs in a separate process, so that a hung file system blocks that process and not the node.
if [ "${1:-}" = attach ]; then
  attach
  exit 0
fi
setsid timeout -k 1 "$limit" sh "$0" attach < /dev/null > /dev/null 2>&1 &
child=$! tenths=0
while kill -0 "$child" 2> /dev/null && [ "$tenths" -lt "${limit}0" ]; do
  sleep 0.1
  tenths=$((tenths + 1))
done
exit 0
