#!/usr/bin/env bash
# `cargo test`, two test binaries at a time: the slow ones mostly wait for timers, and would do so one after another.
#   tests/tools/beside.sh [what cargo test takes, as -p gpumem-runs; without it the workspace]
# LANES=1 runs them one by one. The output of each binary comes whole when it has ended, as the runner wrote it; fails if one fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO=${CARGO:-cargo}
[ $# -gt 0 ] || set -- --workspace

# Which of them wait longest: they begin, so that the others fill the time beside them.
slow='operators|gpu_dry_run|job_fleet|fleet_slurm|fleet_kubernetes|fleet_containers|live_faults|package|torch_training'
# These fill the machine by themselves, or measure how long something takes: they run when the others are done, one by one.
alone='soak|peers|systemd'

work=$(mktemp -d "${TMPDIR:-/tmp}/gpumem-tests.XXXXXX")
trap 'rm -rf "$work"' EXIT
export work
# What cargo would tell them.
while read -r name value; do
  [ -n "${!name:-}" ] || export "$name=$value"
done < <(sed -n 's/^\([A-Z_]*\) = "\(.*\)"$/\1 \2/p' .cargo/config.toml)

# Folder of the package, and the binary.
"$CARGO" test "$@" --locked --no-run --message-format=json-render-diagnostics > "$work/built"
sed -n 's|.*"manifest_path":"\([^"]*\)/Cargo.toml".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*|\1 \2|p' "$work/built" > "$work/all"
[ -s "$work/all" ]
{ grep -E "/($slow)-[0-9a-f]+\$" "$work/all" || true; grep -vE "/($slow|$alone)-[0-9a-f]+\$" "$work/all" || true; } > "$work/list"
grep -E "/($alone)-[0-9a-f]+\$" "$work/all" > "$work/last" || true

one() {
  local out rc=0 began=$SECONDS
  out=$(mktemp "$work/out.XXXXXX")
  (cd "$1" && CARGO_MANIFEST_DIR=$1 "$2") > "$out" 2>&1 || rc=$?
  (
    flock 9
    printf '\n     Running %s (%d s)\n' "${2##*/}" $((SECONDS - began))
    cat "$out"
    if [ $rc -ne 0 ]; then
      printf 'error: %s ended with %d\n' "${2##*/}" $rc
      echo "$2" >> "$work/failed"
    fi
  ) 9> "$work/lock"
  rm -f "$out"
}
export -f one
xargs -r -L 1 -P "${LANES:-2}" bash -c 'one "$@"' one < "$work/list"
xargs -r -L 1 bash -c 'one "$@"' one < "$work/last"

"$CARGO" test "$@" --locked --doc || echo "doc tests" >> "$work/failed"
if [ -s "$work/failed" ]; then
  echo "failed:"
  cat "$work/failed"
  exit 1
fi
