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
tools=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d /tmp/gpumem-shot.XXXXXX)
failed=0
# Ends everything that runs on the simulated machine.
finish() {
  grep -lsz "^GPUMEM_SIM=$dir/machine\$" /proc/[0-9]*/environ | cut -d / -f 3 | xargs kill 2> /dev/null || true
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
  for _ in $(seq 100); do [ ! -S "$GPUMEM_CONTROL" ] || break; sleep 0.05; done
}

train() { # NAME ARGUMENTS...
  "$bin/gpumemctl" run --quiet --name "$1" -- "$fake/bin/trainer" --quiet "${@:2}" > /dev/null 2>&1
}

report() { # NAME ARGUMENTS...
  "$bin/gpumemctl" report --html --by tag -o "$dir/$1.html" "${@:2}" 2> "$dir/log.report"
}

# Pictures of a whole page. A fault in its layout fails the script at its end.
all_sizes() { # URL NAME
  python3 "$tools/pages.py" "$1" "$out/$2-{size}-{theme}.png" 360 800 1400 2>> "$dir/faults" || failed=1
}

in_terminals() { # NAME TEXT ARGUMENTS OF gpumemctl...
  # As wide as 360, 628, 800 and 1,400 pixels.
  for size in 43x40 80x24 100x30 176x50; do
    LC_ALL=C.UTF-8 python3 "$tools/terminal.py" "$size" "$dir/terminal.html" "$2" "$bin/gpumemctl" "${@:3}"
    python3 "$tools/pages.py" "file://$dir/terminal.html" "$out/$1-$size-{theme}.png" "$((${size%x*} * 785 / 100 + 20))x$((${size#*x} * 152 / 10 + 18))"
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
  report demo
  mkdir -p "$(dirname "$out")"
  python3 "$tools/pages.py" "file://$dir/demo.html" "$out" "${SIZE:-1280x760}"
  echo "$out: $(stat -c %s "$out") bytes"
  exit
fi

out=$(realpath -m "${4:?the folder for the pictures}")
mkdir -p "$out"
machine devices=8 memory=16G utilization=97 power=640
for kind in "healthy --steps 200 --no-cache" "leak --steps 200 --leak 1" "oom --steps 100000 --leak 64"; do
  read -r name arguments <<< "$kind"
  # shellcheck disable=SC2086 # a list of arguments; the program that runs out of memory fails
  train "$name" --devices 0 --step-ms 20 $arguments || true
  report "$name"
  all_sizes "file://$dir/$name.html" "report-$name"
  in_terminals "text-$name" "next:" report
done
in_terminals text-oom-record "Other processes" oom
all_sizes "http://127.0.0.1:$port/process/$(processes '"%d.%d" % (found["ended"][0]["pid"], found["ended"][0]["start_ticks"])')" live-oom
# A recording has single blocks.
"$bin/gpumemctl" run --quiet --record "$dir/blocks.gpumem" -- "$fake/bin/trainer" --quiet --steps 40 --step-ms 1 > /dev/null 2>&1
report blocks "$dir/blocks.gpumem"
all_sizes "file://$dir/blocks.html" report-blocks

# Starts the processes of a job; the one of rank 3 leaks, the others have these arguments.
ranks() { # JOB COUNT ARGUMENTS
  # shellcheck disable=SC2016 # the inner shell expands it
  "$bin/gpumemctl" run --quiet --name "$1" -- bash -c '
    for ((rank = 0; rank < $2; rank++)); do
      arguments="$3 --seed $rank --no-cache"
      [ "$rank" != 3 ] || arguments="--steps 1000000 --step-ms 100 --leak 1"
      RANK=$rank "$1" --quiet --devices $((rank % 8)) $arguments &
    done
    wait' ranks "$fake/bin/trainer" "$2" "$3" > /dev/null 2>&1 &
}
# Pictures of the node, and of the job that is all of its processes.
job() { # NAME PROCESSES
  all_sizes "http://127.0.0.1:$port/" "live-$1"
  in_terminals "top-$1" "$2 processes" top --interval 0.2
  report "$1" --job "$1"
  all_sizes "file://$dir/$1.html" "report-$1"
}
ranks node 8 "--steps 1000000 --step-ms 100"
until_true is 'sum(bool(row["used_bytes"]) for row in found["processes"]) == 8 and found["findings"] != []'
job node 8
for kind in "healthy 5" "leak 3"; do
  read -r name device <<< "$kind"
  row="[row for row in found[\"processes\"] if row[\"device\"] == $device][0]"
  all_sizes "http://127.0.0.1:$port/process/$(processes "\"%d.%d\" % ($row[\"pid\"], $row[\"start_ticks\"])")" "live-$name"
  in_terminals "top-$name" "MiB, by" top --interval 0.2 "$(processes "$row[\"pid\"]")"
done
processes '" ".join(str(row["pid"]) for row in found["processes"])' | xargs kill
until_true is 'found["processes"] == []'
ranks processes 64 "--steps 5 --hold 1000"
until_true is 'sum(bool(row["used_bytes"]) for row in found["processes"]) == 64 and any(finding["severity"] == "warning" for finding in found["findings"])'
job processes 64
cat "$dir/faults" >&2
echo "$out: $(find "$out" -name '*.png' | wc -l) pictures"
exit "$failed"
