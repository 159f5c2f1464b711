#!/usr/bin/env bash
# Makes pictures of the pages on the simulated GPU, in Chromium.
#   screenshot.sh BIN FAKE [OUT]         docs/images/report.png, the picture in README.md: the report page of a training run
#   screenshot.sh BIN FAKE --set FOLDER  a healthy run, a leak, an OOM, a node with 8 GPUs and one with 64 processes, each at three
#                                        widths, light and dark
# BIN: gpumemd, gpumemctl, libgpumem.so    FAKE: bin/ and lib/ of tests/fake-gpu and tests/trainer
# After `make demo`: tests/tools/screenshot.sh target/demo target/fake-gpu
set -euo pipefail
bin=$(cd "$1" && pwd)
fake=$(cd "$2" && pwd)
chromium=$(command -v chromium chromium-browser google-chrome | head -n 1) || { echo "needs Chromium: apt-get install chromium" >&2; exit 2; }
dir=$(mktemp -d /tmp/gpumem-shot.XXXXXX)
started=()
finish() {
  [ ${#started[@]} -eq 0 ] || kill "${started[@]}" 2> /dev/null || true
  wait 2> /dev/null || true
  rm -rf "$dir"
}
trap finish EXIT

export GPUMEM_SIM=$dir/machine LD_LIBRARY_PATH=$fake/lib
export GPUMEM_CONTROL=$dir/run/control.sock GPUMEM_STORE=$dir/runs.sqlite GPUMEM_LIBRARY=$bin/libgpumem.so
port=9871

machine() { # KEY=VALUE...
  "$fake/bin/fake-gpu" init "$GPUMEM_SIM" "$@"
  printf 'runtime_dir = "%s/run"\n[nvml]\nlist_every_s = 0.5\nlist_budget = 1.0\n[runs]\nstore = "%s/runs.sqlite"\n[metrics]\nlisten = "127.0.0.1:%s"\n' \
    "$dir" "$dir" "$port" > "$dir/gpumemd.toml"
  "$bin/gpumemd" --config "$dir/gpumemd.toml" 2> "$dir/log" &
  started+=($!)
  for _ in $(seq 100); do [ ! -S "$GPUMEM_CONTROL" ] || break; sleep 0.05; done
}

train() { # NAME ARGUMENTS...
  "$bin/gpumemctl" run --quiet --name "$1" -- "$fake/bin/trainer" --quiet "${@:2}" > /dev/null 2>&1
}

report() { # FILE
  "$bin/gpumemctl" report --html --by tag -o "$1" 2> "$dir/log.report"
}

# --no-sandbox: the page is the script's own, and a container may forbid Chromium its sandbox.
shoot() { # URL OUT WIDTH,HEIGHT [OPTION...]
  timeout 120 "$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$dir/browser" --virtual-time-budget=5000 "${@:4}" \
    --window-size="$3" --screenshot="$2" "$1" 2> "$dir/chromium.log" || { cat "$dir/chromium.log" >&2; exit 1; }
}

all_sizes() { # URL NAME
  for width in 360 800 1400; do
    shoot "$1" "$out/$2-$width-light.png" "$width,1400"
    shoot "$1" "$out/$2-$width-dark.png" "$width,1400" --blink-settings=preferredColorScheme=0
  done
}

if [ "${3:-}" != --set ]; then
  out=$(realpath -m "${3:-$(dirname "$0")/../../docs/images/report.png}")
  machine devices=1 memory=8G
  train demo --devices 0 --steps 200 --step-ms 40 --leak 1
  report "$dir/report.html"
  mkdir -p "$(dirname "$out")"
  shoot "file://$dir/report.html" "$out" "${SIZE:-1280,700}"
  echo "$out: $(stat -c %s "$out") bytes"
  exit
fi

out=$(realpath -m "${4:?the folder for the pictures}")
mkdir -p "$out"
machine devices=8 memory=8G
for kind in "healthy --steps 200 --no-cache" "leak --steps 200 --leak 1" "oom --steps 100000 --leak 64"; do
  read -r name arguments <<< "$kind"
  # shellcheck disable=SC2086 # a list of arguments; the program that runs out of memory fails
  train "$name" --devices 0 --step-ms 20 $arguments || true
  report "$dir/$name.html"
  all_sizes "file://$dir/$name.html" "$name"
done
for device in 0 1 2 3 4 5 6 7; do
  train "job-$device" --devices "$device" --steps 1000000 --step-ms 100 --no-cache --seed "$device" &
  started+=($!)
done
for _ in $(seq 300); do [ "$("$bin/gpumemctl" ps --json | grep -c '"used_bytes": [1-9]')" -lt 8 ] || break; sleep 0.1; done
all_sizes "http://127.0.0.1:$port/" node
for at in $(seq 56); do
  sleep 1000 &
  started+=($!)
  "$fake/bin/fake-gpu" hold "$GPUMEM_SIM" $! $((at % 8)) $(((at * 37 % 11 + 1) << 26))
done
all_sizes "http://127.0.0.1:$port/" processes
echo "$out: $(find "$out" -name '*.png' | wc -l) pictures"
