#!/bin/sh
# Runs a command as if unpacked packages were installed: they are mounted over this machine's files, in separate mount,
# process and network namespaces. Nothing outside changes; everything ends with the command.
#
#   over.sh PACKAGES FOLDER COMMAND...    FOLDER: for written files, in memory
set -e
if [ "$1" != inside ]; then
  exec unshare --mount --net --uts --pid --fork --kill-child --mount-proc --propagation private "$0" inside "$@"
fi
packages=$2 top=$3/over
shift 3
mkdir -p "$top"
mount -t tmpfs none "$top"
mkdir "$top/upper" "$top/work" "$top/root"
cp -a "$packages/." "$top/upper/"
mount -t overlay overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" "$top/root"
for place in proc sys dev tmp; do mount --rbind "/$place" "$top/root/$place"; done
mount -t tmpfs none "$top/root/run"
ip link set lo up
exec chroot "$top/root" "$@"
