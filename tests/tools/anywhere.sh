#!/usr/bin/env bash
# Runs `make test` in fresh clones of this checkout's HEAD: {root, ordinary user} x {/tmp/x, below a home of mode 0700,
# a path with a space, a path longer than 100 characters}. Two clones run next to busy loops on every core, and one
# without a network. Ends with a table: user, path, condition, result, tests, seconds. Needs root, and changes nothing
# outside a temporary folder.
#
#   anywhere.sh                            everything: 11 runs, about 6 minutes each, all built from nothing
#   anywhere.sh root-plain user-space ...  these only; --list has the names
#   anywhere.sh --ordinary-user-awkward-path   one run, as in CI: an ordinary user, in a path with all these difficulties
#
# Every clone has its own target folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD
USER_ID=54321

long=$(printf 'a-rather-long-name-of-a-folder-%.0s' 1 2 3 4)
# NAME: user, folder below the scratch folder, mode of its parent, condition
cases="
root-plain      root  x                                  0755 quiet
root-home       root  home/gpumemd                       0700 quiet
root-space      root  with\ space/gpumemd                0755 quiet
root-long       root  $long/gpumemd                      0755 quiet
user-plain      user  x                                  0755 quiet
user-home       user  home/gpumemd                       0700 quiet
user-space      user  with\ space/gpumemd                0755 quiet
user-long       user  $long/gpumemd                      0755 quiet
root-busy       root  x                                  0755 busy
user-busy       user  home/gpumemd                       0700 busy
user-offline    user  x                                  0755 offline
"
awkward="user-awkward user private/$long/gpumem\ space/gpumemd 0700 quiet"

[ "${1:-}" != --list ] || { echo "$cases" | awk 'NF { print $1 }'; exit 0; }
[ "$(id -u)" = 0 ] || { echo "anywhere.sh: needs root, to become another user: sudo $0" >&2; exit 2; }

scratch=$(mktemp -d /tmp/gpumem-anywhere.XXXXXX)
chmod 755 "$scratch"
busy=
finish() {
  # shellcheck disable=SC2086
  [ -z "$busy" ] || kill $busy 2> /dev/null || true
  rm -rf "$scratch"
}
trap finish EXIT

# The toolchain and the crates, where another user can read them: hard links where that is possible.
cargo fetch --locked -q
share() { mkdir -p "$(dirname "$2")" && { cp -al "$1" "$2" 2> /dev/null || cp -a "$1" "$2"; }; }
share "$(rustc --print sysroot)" "$scratch/rust"
share "${CARGO_HOME:-$HOME/.cargo}/registry" "$scratch/crates/registry"
for config in config.toml config; do
  [ ! -e "${CARGO_HOME:-$HOME/.cargo}/$config" ] || cp "${CARGO_HOME:-$HOME/.cargo}/$config" "$scratch/crates/"
done
samples=
[ -n "${GPUMEM_SAMPLES:-}" ] || [ ! -d ../shared/samples ] || GPUMEM_SAMPLES=../shared/samples
if [ -n "${GPUMEM_SAMPLES:-}" ]; then
  samples=$scratch/samples
  cp -rL "$GPUMEM_SAMPLES" "$samples"
  chmod -R a+rX "$samples"
fi

run() { # NAME USER FOLDER MODE CONDITION
  local name=$1 user=$2 top=$scratch/$1 clone=$scratch/$1/$3 mode=$4 condition=$5 began=$SECONDS code=0 as=() net=()
  mkdir -p "$clone"
  git clone -q "file://$here" "$clone" 2> /dev/null || git -c safe.directory='*' clone -q "$here" "$clone"
  mkdir -p "$top/home"
  cp -al "$scratch/crates" "$top/cargo"
  if [ "$user" = user ]; then
    chown -R $USER_ID:$USER_ID "$top"
    as=(setpriv --reuid $USER_ID --regid $USER_ID --clear-groups)
  fi
  chmod "$mode" "$(dirname "$clone")" "$top/${3%%/*}"
  [ "$condition" != offline ] || net=(unshare --net sh -c 'ip link set lo up; exec "$0" "$@"')
  if [ "$condition" = busy ]; then
    for _ in $(seq $((2 * $(nproc)))); do (while :; do :; done) & busy="$busy $!"; done
  fi
  (
    cd "$clone"
    exec env -i PATH="$scratch/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" HOME="$top/home" CARGO_HOME="$top/cargo" \
      CARGO_NET_OFFLINE=true CARGO_TERM_COLOR=never GPUMEM_SAMPLES="$samples" ${GPUMEM_TOOLS_REQUIRED:+GPUMEM_TOOLS_REQUIRED=1} \
      "${net[@]}" "${as[@]}" make test
  ) > "$scratch/$name.txt" 2>&1 < /dev/null || code=$?
  # shellcheck disable=SC2086
  if [ -n "$busy" ]; then kill $busy; wait $busy 2> /dev/null || true; busy=; fi
  local seconds=$((SECONDS - began)) last
  last=$(grep -E '^[0-9]+ passed, ' "$scratch/$name.txt" | tail -n 1)
  # Indented, because the last lines of test output are summed.
  if [ "$code" != 0 ]; then sed 's/^/  | /' "$scratch/$name.txt"; fi
  printf '%-14s %-5s %-8s %-6s %4d s  %s\n' "$name" "$user" "$condition" "$([ $code = 0 ] && echo green || echo RED)" "$seconds" "$last" | tee -a "$scratch/table"
  rm -rf "$top"
  return $code
}

failed=0
if [ "${1:-}" = --ordinary-user-awkward-path ]; then
  list=$awkward
else
  list=$(for name in "${@:-}"; do echo "$cases" | grep "^$name[ ]" || true; done)
  [ -n "$list" ] || list=$cases
fi
while IFS= read -r line; do
  [ -n "$line" ] || continue
  # Fields with an escaped space: the shell takes them apart.
  eval "set -- $line"
  run "$@" || failed=1
done <<< "$list"
echo
cat "$scratch/table"
awk '{ passed += $7; failed += $9; skipped += $11 } END { printf "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped }' "$scratch/table"
exit $failed
