#!/usr/bin/env bash
# Makes pictures of the pages and of terminals on the simulated GPU, in Chromium.
#   screenshot.sh BIN FAKE [OUT]         docs/images/report.png, the picture in README.md: the report page of a training run
#   screenshot.sh BIN FAKE --set FOLDER  a healthy run, a leak, an OOM, a node with 8 GPUs and one with 64 processes: report page,
#                                        live page, text report, and top in a terminal (needs tmux), each at three widths, light and dark
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
  # On a busy machine Chromium may hang at its start.
  for _ in 1 2 3; do
    timeout 60 "$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$dir/browser" --virtual-time-budget=5000 "${@:4}" \
      --window-size="$3" --screenshot="$2" "$1" 2> "$dir/chromium.log" && return
  done
  cat "$dir/chromium.log" >&2
  exit 1
}

both_themes() { # URL NAME WIDTH,HEIGHT
  shoot "$1" "$out/$2-light.png" "$3"
  shoot "$1" "$out/$2-dark.png" "$3" --blink-settings=preferredColorScheme=0
}

all_sizes() { # URL NAME
  for width in 360 800 1400; do both_themes "$1" "$2-$width" "$width,1400"; done
}

in_terminals() { # NAME TEXT ARGUMENTS OF gpumemctl...
  for size in 43x40 80x24 176x50; do
    LC_ALL=C.UTF-8 python3 "$(dirname "$0")/terminal.py" "$size" "$dir/terminal.html" "$2" "$bin/gpumemctl" "${@:3}"
    both_themes "file://$dir/terminal.html" "$1-$size" "$((${size%x*} * 785 / 100 + 20)),$((${size#*x} * 17 + 20))"
  done
}

processes() { # Python expression of `found`, the document of /api/processes
  curl -s "http://127.0.0.1:$port/api/processes" | python3 -c "import json, sys; found = json.load(sys.stdin); print($1)"
}

until_true() { # COMMAND...
  for _ in $(seq 600); do ! "$@" || return 0; sleep 0.1; done
  echo "screenshot.sh: waited a minute for: $*" >&2
  exit 1
}
is() { [ "$(processes "$1")" = True ]; }

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
  all_sizes "file://$dir/$name.html" "report-$name"
  in_terminals "text-$name" "next:" report
done
in_terminals text-oom-record "Other processes" oom
all_sizes "http://127.0.0.1:$port/process/$(processes '"%d.%d" % (found["ended"][0]["pid"], found["ended"][0]["start_ticks"])')" live-oom
for device in 0 1 2 3 4 5 6 7; do
  arguments="--seed $device --no-cache"
  [ "$device" != 3 ] || arguments="--leak 1"
  # shellcheck disable=SC2086 # a list of arguments
  train "job-$device" --devices "$device" --steps 1000000 --step-ms 100 $arguments &
  started+=($!)
done
until_true is 'sum(bool(row["used_bytes"]) for row in found["processes"]) == 8 and found["findings"] != []'
all_sizes "http://127.0.0.1:$port/" node
in_terminals top-node "8 processes" top --interval 0.2
for kind in "healthy 5" "leak 3"; do
  read -r name device <<< "$kind"
  row="[row for row in found[\"processes\"] if row[\"device\"] == $device][0]"
  all_sizes "http://127.0.0.1:$port/process/$(processes "\"%d.%d\" % ($row[\"pid\"], $row[\"start_ticks\"])")" "live-$name"
  in_terminals "top-$name" "MiB, by" top --interval 0.2 "$(processes "$row[\"pid\"]")"
done
for at in $(seq 56); do
  sleep 1000 &
  started+=($!)
  "$fake/bin/fake-gpu" hold "$GPUMEM_SIM" $! $((at % 8)) $(((at * 37 % 11 + 1) << 26))
done
until_true is 'len(found["processes"]) == 64'
all_sizes "http://127.0.0.1:$port/" processes
in_terminals top-processes "64 processes" top --interval 0.2
echo "$out: $(find "$out" -name '*.png' | wc -l) pictures"
