#!/bin/sh
# Makes the RPM from built programs and prints its path. Equal files give an equal package, byte by byte.
#
#     rpm.sh PROGRAMS OUT
#
# VERSION: replaces the workspace's version, for tests of upgrades. PAYLOAD: rpmbuild's compression (w6.xzdio, which RHEL 7
# to 10 read). Needs rpmbuild (Debian: apt-get install rpm).
set -eu

command -v rpmbuild > /dev/null || { echo "there is no rpmbuild: apt-get install rpm, or dnf install rpm-build" >&2; exit 1; }
PURL=pkg:rpm/gpumemd
export PURL
# shellcheck source=packaging/tree.sh
. "$(dirname "$0")/tree.sh"

# The list of files is taken from the tree. The package owns its own folders, and those of completions, which other packages make
# only where the shell is installed.
cd "$tree"
{
  sed "s/@VERSION@/$VERSION/g" "$root/packaging/rpm/gpumemd.spec"
  find etc usr -type d \( -path 'etc/gpumemd*' -o -path 'usr/lib/gpumem*' -o -path 'usr/share/doc/gpumem*' \
    -o -path 'usr/share/fish*' -o -path 'usr/share/zsh*' \) -printf '%%dir "/%p"\n'
  find etc usr ! -type d -printf '"/%p"\n' | sed 's|^"/etc/|%config(noreplace) &|'
} > "$work/gpumemd.spec"
find "$tree" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

rpmbuild -bb --quiet --target "$(uname -m)-linux" --buildroot "$tree" --define "_topdir $work/rpm" --define "_rpmdir $out" \
  --define "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm" --define "_binary_payload ${PAYLOAD:-w6.xzdio}" \
  --define "_docdir /usr/share/doc" --define "_dbpath $work/db" "$work/gpumemd.spec" > "$work/log" 2>&1 \
  || { cat "$work/log" >&2; exit 1; }
echo "$out/gpumemd-$VERSION-1.$(uname -m).rpm"
