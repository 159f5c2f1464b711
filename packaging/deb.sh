#!/bin/sh
# Makes the Debian package from built programs and prints its path. Equal files give an equal package, byte by byte.
#
#     deb.sh PROGRAMS OUT
#
# VERSION: replaces the workspace's version, for tests of upgrades.
#
# Uses dpkg-deb instead of cargo-deb: install.sh has the layout, and cargo-deb needs a second list of the files. cargo-deb also
# takes three minutes to build; this script takes two seconds.
set -eu

PURL=pkg:deb/debian/gpumemd
export PURL
# shellcheck source=packaging/tree.sh
. "$(dirname "$0")/tree.sh"
architecture=$(dpkg --print-architecture)
revision=$VERSION-1
debian=$root/packaging/debian

# Debian's paths for completions and documents.
share=$tree/usr/share
mv "$share/zsh/site-functions" "$share/zsh/vendor-completions"
own=$share/doc/gpumemd
mkdir -p "$own"
install -m 644 "$debian/copyright" "$own/copyright"
rm "$share/doc/gpumem/LICENSE"
gzip -9n "$share/doc/gpumem/third-party.txt"
mv "$share/doc/gpumem/CHANGELOG.md" "$own/changelog"
{
  printf 'gpumemd (%s) unstable; urgency=medium\n\n  * The changes are in changelog.gz.\n\n' "$revision"
  printf ' -- gpumemd maintainers <gpumemd@gpumemd.invalid>  %s\n' "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
} > "$own/changelog.Debian"
gzip -9n "$own/changelog" "$own/changelog.Debian"
mkdir -p "$share/lintian/overrides"
install -m 644 "$debian/lintian-overrides" "$share/lintian/overrides/gpumemd"

# Versions of the C library that the programs need.
mkdir -p "$work/shlibs/debian"
printf 'Source: gpumemd\n\nPackage: gpumemd\nArchitecture: any\n' > "$work/shlibs/debian/control"
depends=$( cd "$work/shlibs" && dpkg-shlibdeps -O "-S$tree" -e "$tree/usr/bin/gpumemd" -e "$tree/usr/bin/gpumemctl" \
  -e "$tree/usr/bin/gpumem-mcp" -e "$library/agent/libgpumem.so" 2> "$work/shlibs/said" ) || { cat "$work/shlibs/said" >&2; exit 1; }
depends=${depends#shlibs:Depends=}

meta=$tree/DEBIAN
mkdir "$meta"
size=$(du -sk --apparent-size "$tree" | cut -f1)
sed -e "s/@VERSION@/$revision/; s/@ARCHITECTURE@/$architecture/; s/@SIZE@/$size/; s/@DEPENDS@/$depends/" \
  "$debian/control" > "$meta/control"
for script in postinst prerm postrm; do
  sed "s/@VERSION@/$VERSION/g" "$debian/$script" > "$meta/$script"
  chmod 755 "$meta/$script"
done
( cd "$tree" && find etc -type f | LC_ALL=C sort | sed 's|^|/|' ) > "$meta/conffiles"
( cd "$tree" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum ) > "$meta/md5sums"
find "$tree" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

package=$out/gpumemd_${revision}_$architecture.deb
dpkg-deb --root-owner-group --build "$tree" "$package" > /dev/null
echo "$package"
