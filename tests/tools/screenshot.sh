#!/usr/bin/env bash
# Makes docs/images/report.png, the picture in README.md: the report page of a training run on the simulated GPU, in Chromium.
#   screenshot.sh BIN FAKE [OUT]    BIN: gpumemd, gpumemctl, libgpumem.so    FAKE: bin/ and lib/ of tests/fake-gpu and tests/trainer
# After `make demo`: tests/tools/screenshot.sh target/demo target/fake-gpu
set -euo pipefail
bin=$(cd "$1" && pwd)
fake=$(cd "$2" && pwd)
out=$(realpath -m "${3:-$(dirname "$0")/../../docs/images/report.png}")
chromium=$(command -v chromium chromium-browser google-chrome | head -n 1) || { echo "needs Chromium: apt-get install chromium" >&2; exit 2; }
dir=$(mktemp -d /tmp/gpumem-shot.XXXXXX)
daemon=
finish() {
  [ -z "$daemon" ] || kill "$daemon" 2> /dev/null || true
  wait 2> /dev/null || true
  rm -rf "$dir"
}
trap finish EXIT

export GPUMEM_SIM=$dir/machine LD_LIBRARY_PATH=$fake/lib
export GPUMEM_CONTROL=$dir/run/control.sock GPUMEM_STORE=$dir/runs.sqlite GPUMEM_LIBRARY=$bin/libgpumem.so
"$fake/bin/fake-gpu" init "$GPUMEM_SIM" devices=1 memory=8G
printf 'runtime_dir = "%s/run"\n[runs]\nstore = "%s/runs.sqlite"\n[metrics]\nlisten = "off"\n' "$dir" "$dir" > "$dir/gpumemd.toml"
"$bin/gpumemd" --config "$dir/gpumemd.toml" 2> "$dir/log" &
daemon=$!
for _ in $(seq 100); do [ ! -S "$GPUMEM_CONTROL" ] || break; sleep 0.05; done

"$bin/gpumemctl" run --quiet --name demo -- "$fake/bin/trainer" --quiet --devices 0 --steps 200 --step-ms 40 --leak 1 > /dev/null
"$bin/gpumemctl" report --html --by tag -o "$dir/report.html" 2> "$dir/log.report"
mkdir -p "$(dirname "$out")"
# --no-sandbox: the page is the script's own, and a container may forbid Chromium its sandbox.
"$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$dir/browser" --virtual-time-budget=3000 \
  --window-size="${SIZE:-1280,700}" --screenshot="$out" "file://$dir/report.html" 2> "$dir/chromium.log" || { cat "$dir/chromium.log" >&2; exit 1; }
echo "$out: $(stat -c %s "$out") bytes"
