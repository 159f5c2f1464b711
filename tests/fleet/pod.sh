#!/bin/sh
# A container as far as a kernel makes one: its own mounts, network and (training) processes, with what the manifests give it. There
# is no kubelet here: this stands for it.
#
#   pod.sh NODE OURS FAKE daemon INIT...     gpumemd's pod: first each INIT, a command line of the manifest
#   pod.sh NODE OURS FAKE train COMMAND...   a training pod, as root, as most images are
#
# NODE has what the node has under run/ (/run/gpumemd), state/ (/var/lib/gpumemd) and library/ (/var/lib/gpumem), and gpumemd.toml.
set -e
node=$1 ours=$2 fake=$3 kind=$4
shift 4
here=$0
case $kind in
daemon | train)
  mkdir -p "$node/run/agent" "$node/state" "$node/library" # as the kubelet does for DirectoryOrCreate: root's, 0755
  [ "$kind" = train ] && alone="--pid --fork --kill-child --mount-proc"
  exec unshare --mount --net --propagation private $alone "$here" "$node" "$ours" "$fake" "in-$kind" "$@"
  ;;
esac

mount -t tmpfs none /mnt
mkdir /mnt/ours /mnt/fake
mount --bind "$ours" /mnt/ours
mount --bind "$fake" /mnt/fake
mount -t tmpfs none /run
mount -t tmpfs none /opt
mkdir /run/gpumemd /opt/gpumem
export LD_LIBRARY_PATH=/mnt/fake/lib
if [ "$kind" = in-train ]; then
  mount --bind "$node/run/agent" /run/gpumemd
  mount -o remount,bind,ro /run/gpumemd
  mount --bind "$node/library" /opt/gpumem
  mount -o remount,bind,ro /opt/gpumem
  ls -A /run/gpumemd
  ! touch /run/gpumemd/control.sock 2> /dev/null || echo "written to the agents' directory"
  exec setpriv --no-new-privs --bounding-set=-sys_admin "$@"
fi
mount -t tmpfs none /var/lib
mkdir /var/lib/gpumemd /var/lib/gpumem /etc/gpumemd 2> /dev/null || true
mount --bind "$node/run" /run/gpumemd
mount --bind "$node/state" /var/lib/gpumemd
# The image's library is where the package has it.
mkdir -p /mnt/image/current /mnt/node
cp "$ours/libgpumem.so" /mnt/image/current/
mount --bind "$node/library" /mnt/node
ip link set lo up
mount -o remount,bind,ro /
for init in "$@"; do
  case $init in
  *chown*) bounding=-all,+chown ;;
  *) bounding=-all ;;
  esac
  setpriv --no-new-privs --inh-caps=-all --bounding-set=$bounding /bin/sh -ec "$init"
done
exec setpriv --reuid 60837 --regid 60837 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \
  /mnt/ours/gpumemd --config "$node/gpumemd.toml"
