#!/bin/sh
# Fetches NVIDIA's own libraries from the public registries of PyPI and Debian, for tests only: they are never committed.
#
#   nvidia.sh FOLDER cupti VERSION   -> FOLDER/cupti-VERSION/libcupti.so.*, from the wheel of that CUPTI release
#   nvidia.sh FOLDER driver MAJOR    -> FOLDER/driver-MAJOR/libcuda.so.1 and libnvidia-ml.so.1; MAJOR is 535 or 550
#
# Does nothing where the folder exists. Ends with 1 and one line on stderr when something cannot be fetched.
set -eu
folder=$1 kind=$2 version=$3
done=$folder/$kind-$version
[ ! -d "$done" ] || exit 0
mkdir -p "$folder"
new=$(mktemp -d "$folder/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
fail() { echo "nvidia.sh: $*" >&2; exit 1; }

fetch_cupti() {
  case $version in
    11.*) package=nvidia-cuda-cupti-cu11 ;;
    12.*) package=nvidia-cuda-cupti-cu12 ;;
    *) package=nvidia-cuda-cupti ;;
  esac
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$new" "$package==$version" > "$new/log" 2>&1 ||
    fail "pip cannot fetch $package $version: $(tail -n 1 "$new/log")"
  mkdir "$new/done"
  python3 - "$new" << 'PYTHON'
import glob, pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
for wheel in glob.glob(f"{folder}/*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if pathlib.PurePath(name).name.startswith("libcupti.so"):
                (folder / "done" / pathlib.PurePath(name).name).write_bytes(archive.read(name))
PYTHON
  ls "$new/done"/libcupti.so.* > /dev/null 2>&1 || fail "the wheel of $package $version has no libcupti"
}

# Debian's releases have one driver each. Its lists go into a folder of their own: the machine's sources stay as they are.
fetch_driver() {
  case $version in
    535) suite=bookworm ;;
    550) suite=trixie ;;
    *) fail "there is no driver $version; there are 535 and 550" ;;
  esac
  keys=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -e $keys ] || fail "needs Debian's keys: apt-get install debian-archive-keyring"
  mkdir -p "$new/apt/parts" "$new/apt/state/lists/partial" "$new/apt/cache/archives/partial" "$new/debs" "$new/done"
  printf 'Types: deb\nURIs: http://deb.debian.org/debian\nSuites: %s\nComponents: non-free\nSigned-By: %s\n' $suite $keys > "$new/apt/parts/nvidia.sources"
  apt() {
    apt-get -q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$new/apt/parts" -o Dir::State="$new/apt/state" -o Dir::Cache="$new/apt/cache" \
      -o Dir::State::status=/dev/null -o APT::Sandbox::User= "$@" > "$new/log" 2>&1
  }
  apt update || fail "apt-get cannot read Debian's list $suite non-free: $(tail -n 1 "$new/log")"
  (cd "$new/debs" && apt download libcuda1 libnvidia-ml1) || fail "apt-get cannot fetch libcuda1 and libnvidia-ml1 of $suite: $(tail -n 1 "$new/log")"
  for deb in "$new"/debs/*.deb; do dpkg-deb -x "$deb" "$new/root"; done
  cp -a "$new"/root/usr/lib/*/nvidia/current/lib*.so* "$new/done"
  [ -e "$new/done/libcuda.so.1" ] && [ -e "$new/done/libnvidia-ml.so.1" ] || fail "the packages of $suite have no libcuda.so.1 or libnvidia-ml.so.1"
}

fetch_"$kind"
# Several tests may fetch the same at once: the first one that is done counts.
mv -T "$new/done" "$done" 2> /dev/null || [ -d "$done" ]
