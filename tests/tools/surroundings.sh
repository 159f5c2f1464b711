#!/bin/sh
# Checks the requirements of `make demo` and `make test` before anything is built. Prints one line for each missing
# requirement, with the command that provides it. Exits with 2 if something is missing, and prints nothing otherwise.
#
#   surroundings.sh demo|test
set -u
cd "$(dirname "$0")/../.." || exit 2
goal=${1:-test}
missing=0
lacks() { # WHAT HOW
  echo "make $goal: $1; $2" >&2
  missing=1
}

version=$(${CARGO:-cargo} --version 2> /dev/null | sed -n 's/^cargo \([0-9]*\.[0-9]*\).*/\1/p')
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if [ -z "$version" ]; then
  lacks "there is no cargo" "get Rust $wanted or newer: https://rustup.rs"
elif [ "$(printf '%s\n%s\n' "$wanted" "$version" | sort -t. -k1,1n -k2,2n | head -n 1)" != "$wanted" ]; then
  lacks "cargo $version is too old, $wanted is needed" "rustup update, or https://rustup.rs"
fi
{ command -v cc && command -v gcc && command -v objcopy; } > /dev/null ||
  lacks "there is no C compiler (cc, gcc, objcopy)" "apt-get install gcc libc6-dev binutils"
command -v make > /dev/null || lacks "there is no make" "apt-get install make"
if [ "$goal" = test ]; then
  if ! command -v python3 > /dev/null; then
    lacks "there is no python3" "apt-get install python3"
  elif ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))'; then
    lacks "$(python3 --version) is too old, 3.9 is needed" "apt-get install python3"
  fi
fi

target=${CARGO_TARGET_DIR:-target}
if ! mkdir -p "$target" 2> /dev/null || ! touch "$target/.writable" 2> /dev/null; then
  lacks "$target cannot be written" "set CARGO_TARGET_DIR to a folder that can, as in: CARGO_TARGET_DIR=/tmp/gpumem make $goal"
else
  rm -f "$target/.writable"
  # Space for a build from nothing; less if parts are built already.
  needs_mib=$([ "$goal" = demo ] && echo 1500 || echo 4000)
  has_mib=$(du -sm "$target" 2> /dev/null | cut -f1)
  free_mib=$(df -Pm "$target" | awk 'NR == 2 { print $4 }')
  [ "$((free_mib + ${has_mib:-0}))" -ge "$needs_mib" ] ||
    lacks "$free_mib MiB are free below $target, $needs_mib are needed" "set CARGO_TARGET_DIR to a folder with more room"
fi
case $target in
  /*[[:space:]]*) lacks "CARGO_TARGET_DIR has a space in it, which make cannot handle" "set it to a path without one" ;;
esac

# The simulated machine is a file there, and the agent's memory is as well.
if [ ! -d /dev/shm ] || ! touch "/dev/shm/.gpumem-$$" 2> /dev/null; then
  lacks "/dev/shm is absent or cannot be written" "mount -t tmpfs -o size=512M tmpfs /dev/shm (in a container: --shm-size=512m)"
else
  rm -f "/dev/shm/.gpumem-$$"
  shm_mib=$(df -Pm /dev/shm | awk 'NR == 2 { print $4 }')
  [ "$shm_mib" -ge 60 ] ||
    lacks "$shm_mib MiB are free in /dev/shm, 60 are needed" "mount -o remount,size=512M /dev/shm (in a container: --shm-size=512m)"
fi
folder=${TMPDIR:-/tmp}
if [ ${#folder} -gt 32 ]; then
  folder=/tmp # paths of Unix sockets end at 107 bytes: demo.sh and lanes.py choose /tmp as well
fi
if ! touch "$folder/.gpumem-$$" 2> /dev/null; then
  lacks "$folder cannot be written" "set TMPDIR to a folder that can, with a path of at most 32 characters"
else
  rm -f "$folder/.gpumem-$$"
fi
[ "$missing" = 0 ] || exit 2
