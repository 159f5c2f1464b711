#!/bin/sh
# Builds the Debian package, the RPM (with rpmbuild), the wheel and the archive twice and compares them byte by byte. The builds
# differ in folder name and length, place of the crates, time, time zone and file modes. The second build has no network.
#
#     reproducible.sh OUT
#
# Builds the commit, not the working tree. Needs the crates once (cargo fetch), and half an hour on two cores.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
cargo=${CARGO:-cargo}
home=${CARGO_HOME:-$HOME/.cargo}
# The same commit for both builds, even if HEAD moves meanwhile.
commit=$(git -C "$root" rev-parse HEAD)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct "$commit")}
export SOURCE_DATE_EPOCH
unset CARGO_TARGET_DIR RUSTFLAGS MAKEFLAGS MAKELEVEL

( cd "$root" && "$cargo" fetch --locked )
# The same crates, at another path.
mkdir -p "$out/other-home-of-crates"
for entry in "$home"/*; do ln -sfn "$entry" "$out/other-home-of-crates/$(basename "$entry")"; done

build() { # FOLDER: the packages of it, one a line
  rm -rf "$out/$1"
  mkdir -p "$out/$1"
  git -C "$root" archive "$commit" | tar -xf - -C "$out/$1"
  for what in deb wheel tarball $(command -v rpmbuild > /dev/null && echo rpm); do
    ( cd "$out/$1" && $alone make -s "$what" CARGO="$cargo" > "$out/said" && realpath -e "$(tail -n 1 "$out/said")" ) || exit 1
  done
}
alone=''
first=$(build one)
# Without network namespaces, only cargo's offline mode is set.
if unshare -n true 2> /dev/null; then alone='unshare -n'; elif unshare -rn true 2> /dev/null; then alone='unshare -rn'; fi
[ -n "$alone" ] || echo "no network namespace can be created here: the second build uses only the offline mode of cargo" >&2
second=$(
  umask 077
  export CARGO_HOME="$out/other-home-of-crates" CARGO_NET_OFFLINE=true TZ=Pacific/Kiritimati LC_ALL=C.UTF-8
  build 'two/in-another-folder'
)
differ=0
for one in $first; do
  two=$(echo "$second" | grep -F "/$(basename "$one")") || { echo "the second build has no $(basename "$one")" >&2; exit 1; }
  sha256sum "$one" "$two"
  cmp "$one" "$two" && continue
  differ=1
  for package in "$one" "$two"; do
    rm -rf "$package.d"
    mkdir "$package.d"
    case $package in
      *.rpm) rpm2archive - < "$package" | tar -xz -C "$package.d" ;;
      *.deb) dpkg-deb -R "$package" "$package.d" ;;
      *.whl) python3 -m zipfile -e "$package" "$package.d" ;;
      *) tar -xf "$package" -C "$package.d" ;;
    esac
  done
  diff -rq "$one.d" "$two.d" || true
done
[ $differ = 0 ] || exit 1
for program in "$out"/one/target/release/gpumemd "$out"/one/target/release/gpumemctl "$out"/one/target/release/gpumem-mcp \
  "$out"/one/target/release/libgpumem.so "$out"/one/target/wheel-programs/gpumem*; do
  if strings -a "$program" | grep -F -e "$HOME/" -e "$out"; then
    echo "$program has paths of this machine" >&2
    exit 1
  fi
done
echo "two builds are equal, byte by byte: $(for one in $first; do basename "$one"; done | tr '\n' ' ')"
