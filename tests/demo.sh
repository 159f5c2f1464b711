#!/usr/bin/env bash
# One training run, explained while it runs and afterwards: on this machine's GPU if NVML responds, else on a simulated
# one. Needs no root, no systemd, no network. `make demo` builds the programs it uses:
#   demo.sh BIN FAKE    BIN: gpumemd, gpumemctl, libgpumem.so    FAKE: bin/ and lib/ of tests/fake-gpu and tests/trainer
set -euo pipefail
TMPDIR=${TMPDIR:-/tmp}
bin=$(cd "$1" && pwd)
fake=$(cd "$2" && pwd)
# The path of a Unix socket ends at 107 bytes.
[ "${#TMPDIR}" -le 32 ] || TMPDIR=/tmp
dir=$(mktemp -d "${TMPDIR:-/tmp}/gpumem-demo.XXXXXX")
daemon=
finish() {
  [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$dir"
}
trap finish EXIT

show() { printf '\n$ %s\n' "$*"; }
ctl() { "$bin/gpumemctl" "$@"; }

start() {
  cat > "$dir/gpumemd.toml" <<END
runtime_dir = "$dir/run"
[runs]
store = "$dir/runs.sqlite"
[metrics]
listen = "off"
END
  "$bin/gpumemd" --config "$dir/gpumemd.toml" 2> "$dir/gpumemd.log" &
  daemon=$!
  for _ in $(seq 200); do
    ! ctl doctor > "$dir/doctor" 2>&1 || return 0
    # It answers with findings: that is an answer too.
    ! grep -q "^gpumemd .* pid" "$dir/doctor" || return 0
    kill -0 "$daemon" 2>/dev/null || break
    sleep 0.05
  done
  cat "$dir/gpumemd.log" >&2
  return 1
}
stop() { kill "$daemon"; wait "$daemon" || true; daemon=; }

export GPUMEM_CONTROL=$dir/run/control.sock GPUMEM_STORE=$dir/runs.sqlite GPUMEM_LIBRARY=$bin/libgpumem.so
start
if ctl doctor | grep -q '^ok  *nvml'; then
  echo "on the GPU of this machine"
  devices=0
else
  stop
  echo "no GPU here (NVML does not answer): on a simulated machine with two"
  export GPUMEM_SIM=$dir/machine LD_LIBRARY_PATH=$fake/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  "$fake/bin/fake-gpu" init "$GPUMEM_SIM" devices=2
  devices=0,1
  start
fi

show "gpumemctl run -- trainer --devices $devices"
ctl run -- "$fake/bin/trainer" --devices "$devices" --steps 150 --step-ms 20 > "$dir/trainer" &
run=$!
for _ in $(seq 400); do
  ! grep -q ^ready "$dir/trainer" || break
  sleep 0.05
done
sleep 1.5
show "gpumemctl ps"
ctl ps
wait "$run"
show "gpumemctl report"
ctl report
show "gpumemctl report --device 0"
ctl report --device 0
