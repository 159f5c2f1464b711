#!/bin/sh
# A clean Debian root with systemd, for tests that install packages and boot: prints its folder.
#
#     debian-root.sh [--into FOLDER] [PACKAGE...]
#
# Built once by mmdebstrap and kept in target/tools (or below CARGO_TARGET_DIR). With PACKAGE arguments, these are added
# in a separate root. Takes about 20 s and 250 MB. Never change the printed folder: copy it, or mount an overlay. Needs
# root. Uses the installed mmdebstrap, or else Debian's package, unpacked and not installed. Prints the reason and exits
# with 1 if the root cannot be built.
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
into=${CARGO_TARGET_DIR:-$here/target}/tools
if [ "${1:-}" = --into ]; then into=$2; shift 2; fi
suite=bookworm
packages="systemd systemd-sysv dbus libnss-systemd iproute2 curl man-db bash-completion $*"

say() { echo "debian-root: $*" >&2; }
[ "$(id -u)" = 0 ] || { say "needs root"; exit 1; }
mkdir -p "$into"
name=debian-$suite-$(printf '%s\n' $packages | sort -u | cksum | cut -d' ' -f1)
root=$into/$name

# One at a time: tests start in parallel.
exec 9> "$into/debian-root.lock"
flock 9
if [ -e "$root/etc/debian_version" ]; then echo "$root"; exit 0; fi

fetch() { # NAME: its package, unpacked
  mkdir -p "$into/$1"
  ( cd "$into/$1"
    apt-get -qq download "$1" 2> /dev/null || { apt-get -qq update && apt-get -qq download "$1"; }
    dpkg-deb -x "$1"_*.deb . ) > /dev/null 2> "$into/$1.log" || { say "$1: $(tail -n 1 "$into/$1.log")"; return 1; }
}
if command -v mmdebstrap > /dev/null; then
  mmdebstrap=mmdebstrap
else
  [ -x "$into/mmdebstrap/usr/bin/mmdebstrap" ] || fetch mmdebstrap || exit 1
  mmdebstrap=$into/mmdebstrap/usr/bin/mmdebstrap
fi

# The archives that this machine uses for the suite itself, and no others.
sources=
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
  if [ -f "$file" ] && grep -q "Suites:.*$suite\|^deb .* $suite" "$file" && grep -q "debian-archive-keyring\|^deb .* $suite main" "$file"; then
    sources="$sources $file"
  fi
done

rm -rf "$root.new"
trap 'rm -rf "$root.new"' EXIT INT TERM
# Manual pages are kept: tests read ours there.
# shellcheck disable=SC2086
"$mmdebstrap" --quiet --mode=root --variant=minbase --include="$(echo $packages | tr ' ' ,)" \
  --aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "3"' \
  "$suite" "$root.new" $sources > "$root.log" 2>&1 < /dev/null \
  || { say "mmdebstrap: $(grep -m 1 '^E:' "$root.log" || tail -n 1 "$root.log")"; exit 1; }
rm -rf "$root.new"/var/cache/apt/archives/*.deb "$root.new"/var/lib/apt/lists/*
mv "$root.new" "$root"
echo "$root"
