#!/bin/sh
# Makes the container image from built programs, as an OCI archive; prints its path. The same files give an image of the same digest.
#
#     image.sh PROGRAMS OUT
#
# Needs no Docker and no registry: buildah builds it, on a base of a few Debian packages (BASE: another image's name). Without
# buildah, OUT/image is left for other builders: docker build OUT/image.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
programs=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
VERSION=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2> /dev/null || echo 0)}
export VERSION SOURCE_DATE_EPOCH
umask 022

context=$out/image
rm -rf "$context"
mkdir -p "$context/root"
cp "$root/packaging/Containerfile" "$context/"
PURL=pkg:oci/gpumemd PREFIX=/usr DESTDIR=$context/root "$root/packaging/install.sh" install "$programs"
# Only the documents that licences require.
mkdir "$context/kept"
( cd "$context/root/usr/share/doc/gpumem" && mv LICENSE third-party.txt sbom.cdx.json "$context/kept/" )
for folder in share lib/systemd lib/sysusers.d lib/tmpfiles.d; do rm -r "$context/root/usr/$folder"; done
mkdir -p "$context/root/usr/share/doc"
mv "$context/kept" "$context/root/usr/share/doc/gpumem"

if ! command -v buildah > /dev/null; then
  echo "there is no buildah: docker build $context" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
build() { verb=$1; shift; buildah --root "$work/store" --runroot "$work/run" --storage-driver vfs "$verb" "$@"; }
debian() { # FOLDER: deb:NAME=VERSION of what has documents there
  for package in "$1"/*/; do
    for log in "$package"changelog.Debian.gz "$package"changelog.gz; do
      [ -e "$log" ] || continue
      gzip -dc "$log" | sed -n "1s/^[^ ]* (\(.*\)).*/deb:$(basename "$package")=\1/p"
      break
    done
  done
}
{
  if [ -z "${BASE-}" ]; then
    # Unpacks the packages without installing them: their scripts do not run, and the image has no package manager.
    mmdebstrap --quiet --mode=root --variant=extract --include=base-files,libc6,libgcc-s1,busybox-static \
      --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr bookworm "$work/base"
    chroot "$work/base" /usr/bin/busybox --install -s /usr/bin
    own=$context/root/usr
    "$root/packaging/sbom.py" pkg:oci/gpumemd "$VERSION" "gpumemd=$own/bin/gpumemd" "gpumemctl=$own/bin/gpumemctl" \
      "gpumem-mcp=$own/bin/gpumem-mcp" "libgpumem.so=$own/lib/gpumem/$VERSION/libgpumem.so" $(debian "$work/base/usr/share/doc") > "$work/sbom"
    cp "$work/sbom" "$own/share/doc/gpumem/sbom.cdx.json"
    rm -rf "$work"/base/dev/* "$work"/base/usr/share/doc "$work"/base/usr/share/man "$work"/base/usr/share/info \
      "$work"/base/usr/share/lintian "$work"/base/var/lib/apt "$work"/base/var/lib/dpkg "$work"/base/var/cache/apt \
      "$work"/base/var/log/* "$work"/base/usr/lib/*/gconv
    container=$(build from scratch)
    build add "$container" "$work/base" /
    BASE=localhost/gpumemd-base
    build commit --timestamp "$SOURCE_DATE_EPOCH" "$container" "$BASE"
  fi
  build build --isolation chroot --timestamp "$SOURCE_DATE_EPOCH" --build-arg "BASE=$BASE" --tag "gpumemd:$VERSION" "$context"
  rm -f "$out/gpumemd-$VERSION.oci.tar"
  build push "localhost/gpumemd:$VERSION" "oci-archive:$out/gpumemd-$VERSION.oci.tar:gpumemd:$VERSION"
} > "$out/image.log" 2>&1 < /dev/null || { tail -n 5 "$out/image.log" >&2; exit 1; }
echo "$out/gpumemd-$VERSION.oci.tar"
