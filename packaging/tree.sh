# Sourced by deb.sh and rpm.sh, with their arguments PROGRAMS and OUT: makes the tree of files of a package for /usr.
# Sets root, out, work (removed at exit), tree and library (the versions' folder in it), upstream and VERSION.
# PURL: the package's type and name, for the list of components.
root=$(cd "$(dirname "$0")/.." && pwd)
programs=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
upstream=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
VERSION=${VERSION:-$upstream}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2> /dev/null || echo 0)}
export VERSION SOURCE_DATE_EPOCH
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tree=$work/tree
PREFIX=/usr DESTDIR=$tree "$root/packaging/install.sh" install "$programs"

# A package manager removes the old version's files when it unpacks the new version, even files that processes have mapped.
# Therefore the package owns one copy of the newest library. Its scripts link that copy into the version's own folder, and
# remove folders that no process uses.
library=$tree/usr/lib/gpumem
mkdir "$library/agent"
mv "$library/$VERSION/libgpumem.so" "$library/agent/"
rmdir "$library/$VERSION"
rm "$library/current"
[ -e "$tree/usr/share/doc/gpumem/third-party.txt" ] || exit 1
find "$tree/usr/share/man" -type f -exec gzip -9n {} +
