#!/bin/sh
# Makes the Debian package from built programs; prints its path. The same files give the same package, byte by byte.
#
#     deb.sh PROGRAMS OUT
#
# VERSION: another number than the workspace's, for tests of upgrades.
#
# dpkg-deb and not cargo-deb: the layout is install.sh's, so a list of files for another tool would be a second truth, and that
# tool takes three minutes to build where this takes two seconds.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
programs=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
upstream=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
VERSION=${VERSION:-$upstream}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2> /dev/null || echo 0)}
export VERSION SOURCE_DATE_EPOCH
architecture=$(dpkg --print-architecture)
revision=$VERSION-1
debian=$root/packaging/debian
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
PURL=pkg:deb/debian/gpumemd PREFIX=/usr DESTDIR=$tree "$root/packaging/install.sh" install "$programs"

# dpkg removes the files of a version when the next one is unpacked, whoever has them mapped. So it owns a file that stands for
# the newest version; the versions' own folders are made from it by postinst, and go when nobody needs them.
library=$tree/usr/lib/gpumem
mkdir "$library/agent"
mv "$library/$VERSION/libgpumem.so" "$library/agent/"
rmdir "$library/$VERSION"
rm "$library/current"

# Where Debian has them.
share=$tree/usr/share
mv "$share/zsh/site-functions" "$share/zsh/vendor-completions"
own=$share/doc/gpumemd
mkdir -p "$own"
install -m 644 "$debian/copyright" "$own/copyright"
rm "$share/doc/gpumem/LICENSE"
[ -e "$share/doc/gpumem/third-party.txt" ] || exit 1
gzip -9n "$share/doc/gpumem/third-party.txt"
mv "$share/doc/gpumem/CHANGELOG.md" "$own/changelog"
{
  printf 'gpumemd (%s) unstable; urgency=medium\n\n  * The changes are in changelog.gz.\n\n' "$revision"
  printf ' -- gpumemd maintainers <gpumemd@gpumemd.invalid>  %s\n' "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
} > "$own/changelog.Debian"
gzip -9n "$own/changelog" "$own/changelog.Debian"
find "$share/man" -type f -exec gzip -9n {} +
mkdir -p "$share/lintian/overrides"
install -m 644 "$debian/lintian-overrides" "$share/lintian/overrides/gpumemd"

# What the programs need of the C library, as they themselves say.
mkdir -p "$work/shlibs/debian"
printf 'Source: gpumemd\n\nPackage: gpumemd\nArchitecture: any\n' > "$work/shlibs/debian/control"
depends=$( cd "$work/shlibs" && dpkg-shlibdeps -O "-S$tree" -e "$tree/usr/bin/gpumemd" -e "$tree/usr/bin/gpumemctl" \
  -e "$library/agent/libgpumem.so" 2> "$work/shlibs/said" ) || { cat "$work/shlibs/said" >&2; exit 1; }
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
