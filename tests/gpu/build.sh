#!/bin/sh
# Builds what the suite needs on a machine that has neither cargo nor a network, into a folder ready to carry:
#   build.sh DIR [--with-fake]
# Release builds for any x86-64 processor, stripped. It includes the programs of programs/ that need no CUDA, in case that
# machine has no C compiler, and without --with-fake two libcupti of other CUDA versions, if PyPI is reachable.
set -eu
out=${1:?build.sh DIR [--with-fake]}
fake=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
target=${CARGO_TARGET_DIR:-$root/target}

cd "$root"
# As `make build` does, so that nothing is compiled twice.
make -s build
for name in gpumemd gpumemctl libgpumem.so; do
    install -m 755 "$target/release/$name" "$out/$name.new"
    strip --strip-unneeded "$out/$name.new"
    mv "$out/$name.new" "$out/$name"
done
make -s -C "$root/tests/trainer" OUT="$out/made"
install -m 755 "$out/made/bin/trainer" "$out/trainer"
strip "$out/trainer"
if [ "$fake" = --with-fake ]; then
    make -s -C "$root/tests/fake-gpu" OUT="$out/made"
    mkdir -p "$out/bin" "$out/lib"
    cp "$out/made/lib/"* "$out/lib/"
    cp "$out/made/bin/fake-gpu" "$out/bin/"
fi
rm -rf "$out/made"
cp "$root/tests/fake-gpu/costs.txt" "$out/"
cd "$here/programs"
cc=${CC:-gcc}
$cc -std=c11 -D_GNU_SOURCE -O2 -s core.c process.c memory.c space.c loops.c table.c cupti.c -o "$out/driver" -ldl -pthread
$cc -std=c11 -D_GNU_SOURCE -O2 -s -shared -fPIC client.c -o "$out/client" -ldl
$cc -std=c11 -D_GNU_SOURCE -O2 -s nvml_cost.c -o "$out/nvml_cost" -ldl
$cc -std=c11 -D_GNU_SOURCE -O2 -s probe.c -o "$out/probe" -ldl -pthread

if [ "$fake" != --with-fake ]; then
    for version in 11.8.87 12.9.79; do
        "$root/tests/tools/nvidia.sh" "$target/nvidia" cupti $version || { echo "the bundle is without libcupti $version" >&2; continue; }
        mkdir -p "$out/cupti-$version"
        cp "$target/nvidia/cupti-$version/"libcupti.so.* "$out/cupti-$version/"
    done
fi

size=$(du -sk "$out" | cut -f1)
echo "$out: $size KiB"
# At most 64 MiB may be transferred, including the repository.
[ "$size" -le 49152 ] || { echo "too large to carry" >&2; exit 1; }
