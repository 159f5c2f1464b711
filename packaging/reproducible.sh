#!/bin/sh
# Builds the Debian package twice and compares the two, byte by byte: in folders of different names and lengths, with crates in different
# places, at different times, time zones and file modes; the second time without a network.
#
#     reproducible.sh OUT
#
# What is committed is built. Needs the crates once (cargo fetch), and half an hour on two cores.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
cargo=${CARGO:-cargo}
home=${CARGO_HOME:-$HOME/.cargo}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
unset CARGO_TARGET_DIR RUSTFLAGS MAKEFLAGS MAKELEVEL

( cd "$root" && "$cargo" fetch --locked )
# Crates elsewhere: the same, by another path.
mkdir -p "$out/other-home-of-crates"
for entry in "$home"/*; do ln -sfn "$entry" "$out/other-home-of-crates/$(basename "$entry")"; done

build() { # FOLDER: the package of it
  rm -rf "$out/$1"
  mkdir -p "$out/$1"
  git -C "$root" archive HEAD | tar -xf - -C "$out/$1"
  ( cd "$out/$1" && $alone make -s deb CARGO="$cargo" | tail -n 1 )
}
alone=''
one=$(build one)
# Where no network of its own can be made, cargo is at least told not to ask.
if unshare -n true 2> /dev/null; then alone='unshare -n'; elif unshare -rn true 2> /dev/null; then alone='unshare -rn'; fi
[ -n "$alone" ] || echo "no network namespace can be made here: the second build is only told to be offline" >&2
two=$(
  umask 077
  export CARGO_HOME="$out/other-home-of-crates" CARGO_NET_OFFLINE=true TZ=Pacific/Kiritimati LC_ALL=C.UTF-8
  build 'two/in-another-folder'
)
for deb in "$one" "$two"; do sha256sum "$deb"; done
if ! cmp "$one" "$two"; then
  for deb in "$one" "$two"; do rm -rf "$deb.d" && dpkg-deb -R "$deb" "$deb.d"; done
  diff -rq "$one.d" "$two.d" || true
  exit 1
fi
if strings -a "$out/one/target/release/gpumemd" | grep -F -e "$HOME" -e "$out"; then
  echo "the daemon has paths of this machine" >&2
  exit 1
fi
echo "two builds are equal, byte by byte"
