#!/bin/sh
# Real containers on the simulated GPU, inside over.sh with Podman: as docs/containers.md has the words.
#
#   containers.sh FOLDER OURS FAKE CDI    FOLDER: with daemon.toml, and GPUMEM_SIM set; CDI: the folder of gpumem.json
set -e
folder=$1 ours=$2 fake=$3 cdi=$4
cd /
# The runtime takes either version of control groups, and not the mixture that some machines have.
mount -t tmpfs none /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /etc/cdi /etc/containers /var/lib/gpumem /run/gpumemd
cp "$cdi/gpumem.json" /etc/cdi/
cp "$ours/libgpumem.so" /var/lib/gpumem/
[ -f /etc/containers/policy.json ] || echo '{"default": [{"type": "insecureAcceptAnything"}]}' > /etc/containers/policy.json

# An image: this machine's own programs.
image=$folder/image
for place in usr proc sys dev run opt etc tmp; do mkdir -p "$image/$place"; done
for place in bin lib lib64; do ln -sfn "usr/$place" "$image/$place"; done

LD_LIBRARY_PATH=$fake/lib "$ours/gpumemd" --config "$folder/daemon.toml" 2> "$folder/gpumemd.log" &
for i in $(seq 100); do [ ! -S /run/gpumemd/control.sock ] || break; sleep 0.1; done

contain() {
  podman --root "$folder/storage" --runroot "$folder/storage-run" --storage-driver vfs --cgroup-manager cgroupfs \
    run --rm --network none --cgroups=disabled --security-opt seccomp=unconfined -v /usr:/usr:ro -v /dev/shm:/dev/shm \
    -v "$fake:/mnt:ro" -e "GPUMEM_SIM=$GPUMEM_SIM" -e LD_LIBRARY_PATH=/mnt/lib "$@"
}
say='echo "pid $$: $(ls -A /run/gpumemd)"; ! touch /run/gpumemd/x 2> /dev/null || echo written; exec /mnt/bin/trainer --steps 30 --step-ms 50'
echo "== cdi"
contain -e GPUMEM_JOB=cdi --device gpumem.dev/agent=all --rootfs "$image" /bin/sh -c "$say"
echo "== volumes"
contain -e GPUMEM_JOB=volumes -v /var/lib/gpumem:/opt/gpumem:ro -v /run/gpumemd/agent:/run/gpumemd:ro \
  -e CUDA_INJECTION64_PATH=/opt/gpumem/libgpumem.so --rootfs "$image" /bin/sh -c "$say"
echo "== off"
contain -e GPUMEM_JOB=off -e GPUMEM_DISABLE=1 --device gpumem.dev/agent=all --rootfs "$image" /bin/sh -c "$say"
for job in cdi volumes off; do
  echo "== report $job"
  "$ours/gpumemctl" report --job $job 2>&1 || true
done
