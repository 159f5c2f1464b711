#!/bin/sh
# Sizes of the packages in TARGET/package and TARGET/wheel, and of the largest files of the .deb.
set -eu
target=$1
for file in "$target"/package/*.deb "$target"/package/*.rpm "$target"/package/*.tar.gz "$target"/package/*.oci.tar "$target"/wheel/*.whl; do
  [ ! -e "$file" ] || printf '%9d kB  %s\n' $(($(stat -c %s "$file") / 1000)) "$(basename "$file")"
done
for deb in "$target"/package/*.deb; do
  [ -e "$deb" ] || continue
  echo "$(basename "$deb") unpacked, its largest files:"
  dpkg-deb --fsys-tarfile "$deb" | tar -tv | sort -k3 -rn | head -n 6 | awk '{ printf "%9d kB  %s\n", $3 / 1000, $6 }'
done
