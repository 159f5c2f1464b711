#!/bin/bash
# Boots the systemd of a Debian root in namespaces of this machine: no Docker, no virtual machine, and nothing remains.
#
#     boot.sh ROOT WORK hybrid|v2 [SHARED...]
#
# ROOT is not changed: writes go to WORK. SHARED folders are visible under their own paths, read-only. Runs until it is
# killed, which ends everything inside. Its only child is the booted init: `nsenter -t PID -m -u -i -n -p -C` enters it.
# Control groups are the machine's: `hybrid` has the version 1 controllers (limits of memory and tasks work, BPF filters
# do not). `v2` has the unified hierarchy, without controllers if the machine uses those in version 1, and vice versa.
# Exits with 77 if the mode is not available. Needs root.
set -euo pipefail

if [ "$1" != --inside ]; then
  root=$(realpath "$1") work=$2 mode=$3
  # Groups of our own in every hierarchy: a new namespace takes the group that it is made in for its root.
  top=/sys/fs/cgroup name=gpumemd-boot-$$
  if [ "$mode" = hybrid ] && [ ! -d $top/memory ]; then
    echo "boot: this machine has no version 1 control groups" >&2
    exit 77
  fi
  groups=()
  for hierarchy in $top $top/*/; do
    [ -e "$hierarchy/cgroup.procs" ] || continue
    group=$hierarchy/$name
    mkdir "$group"
    groups+=("$group")
    for file in cpuset.cpus cpuset.mems; do
      [ ! -e "$hierarchy/$file" ] || [ ! -e "$group/$file" ] || cat "$hierarchy/$file" > "$group/$file" 2> /dev/null || :
    done
  done
  mkdir -p "$work/up" "$work/scratch" "$work/root"
  remove() {
    for group in "${groups[@]}"; do
      # Processes inside may take a moment to end.
      for _ in $(seq 50); do
        find "$group" -depth -type d -exec rmdir {} + 2> /dev/null || :
        [ -d "$group" ] || break
        sleep 0.05
      done
    done
  }
  trap remove EXIT
  trap 'kill -KILL $inner 2> /dev/null' TERM INT
  (
    for group in "${groups[@]}"; do echo $BASHPID > "$group/cgroup.procs"; done
    exec unshare --pid --fork --kill-child --mount --uts --ipc --cgroup --net --propagation private \
      "$0" --inside "$root" "$work" "$mode" "${@:4}"
  ) < /dev/null &
  inner=$!
  echo $inner > "$work/pid"
  wait $inner || :
  wait $inner 2> /dev/null || :
  exit 0
fi

shift
root=$1 work=$2 mode=$3
shift 3
new=$work/root
mount -t overlay overlay -o "lowerdir=$root,upperdir=$work/up,workdir=$work/scratch" "$new"
hostname gpumemd-test
ip link set lo up
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys"
mount -t tmpfs -o mode=755 tmpfs "$new/run"
mount -t tmpfs -o mode=1777 tmpfs "$new/tmp"
mount -t tmpfs -o mode=755 tmpfs "$new/dev"
for node in null zero full random urandom tty kmsg; do
  touch "$new/dev/$node"
  mount --bind "/dev/$node" "$new/dev/$node"
done
mkdir "$new/dev/pts" "$new/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$new/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$new/dev/shm"
ln -s pts/ptmx "$new/dev/ptmx"
ln -s /proc/self/fd "$new/dev/fd"
for stream in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${stream%%:*}" "$new/dev/${stream#*:}"; done
for shared in "$@"; do
  mkdir -p "$new$shared"
  mount --bind "$shared" "$new$shared"
  mount -o remount,bind,ro "$new$shared"
done
if [ "$mode" = v2 ]; then
  mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
else
  mount -t tmpfs -o mode=755 tmpfs "$new/sys/fs/cgroup"
  for controller in cpu cpuacct cpuset memory devices freezer blkio pids; do
    mkdir "$new/sys/fs/cgroup/$controller"
    mount -t cgroup -o $controller cgroup "$new/sys/fs/cgroup/$controller"
  done
  mkdir "$new/sys/fs/cgroup/systemd" "$new/sys/fs/cgroup/unified"
  mount -t cgroup -o none,name=systemd cgroup "$new/sys/fs/cgroup/systemd"
  mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup/unified"
fi
: > "$new/etc/machine-id" # a first boot: it is given one
mkdir -p "$new/.old"
cd "$new"
pivot_root . .old
umount -l /.old
exec env -i container=unshare PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
  /lib/systemd/systemd --log-target=journal --show-status=0 systemd.unit=multi-user.target < /dev/null > /dev/null 2>&1
