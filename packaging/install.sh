#!/bin/sh
# The only layout of an installation: `make install`, the .deb, the RPM, the tarball and the image all use this script.
#
#     install.sh install FOLDER      the programs and the library are taken from FOLDER
#     install.sh uninstall
#
# PREFIX (/usr/local), DESTDIR, SYSCONFDIR (/etc; PREFIX/etc below other prefixes than /usr and /usr/local), VERSION (the workspace's),
# AT: where PREFIX will be when the programs run, if not there. STRIP=no keeps symbols.
#
#     bin/gpumemd, gpumemctl, gpumem-mcp    lib/gpumem/VERSION/libgpumem.so, lib/gpumem/current -> VERSION
#     include/gpumem.h                      lib/gpumem/versions: lists and removes them
#     share/man, bash-completion, zsh, fish lib/systemd/system, lib/sysusers.d, lib/tmpfiles.d
#     share/doc/gpumem/                     rules, prometheus, grafana, kubernetes, slurm, systemd (drop-ins), the documents;
#                                           sbom.cdx.json: components of the programs, for the package PURL
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
PREFIX=${PREFIX-/usr/local}
AT=${AT-$PREFIX}
VERSION=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)}
case $PREFIX in
  /usr | /usr/local) SYSCONFDIR=${SYSCONFDIR:-/etc} ;;
  *) SYSCONFDIR=${SYSCONFDIR:-$PREFIX/etc} ;;
esac
prefix=${DESTDIR-}$PREFIX
sysconf=${DESTDIR-}$SYSCONFDIR
library=$prefix/lib/gpumem

# MODE FROM TO: the new file takes the old one's name in one step. Running or mapped files stay unchanged.
put() {
  mkdir -p "$(dirname "$3")"
  install -m "$1" "$2" "$3.new.$$"
  mv -fT "$3.new.$$" "$3"
}

program() {
  put 755 "$1" "$2"
  if [ "${STRIP-}" != no ] && command -v strip > /dev/null; then
    strip --strip-unneeded -o "$2.new.$$" "$2"
    mv -fT "$2.new.$$" "$2"
  fi
}

tree() { # FROM TO
  [ -d "$1" ] || return 0
  ( cd "$1" && find . -type f ! -name '.*' | LC_ALL=C sort ) | while read -r file; do
    mode=644
    [ ! -x "$1/$file" ] || mode=755
    put $mode "$1/$file" "$2/${file#./}"
  done
}

install_all() {
  programs=$1
  for name in gpumemd gpumemctl gpumem-mcp libgpumem.so; do
    [ -e "$programs/$name" ] || { echo "$programs/$name is not there: make build" >&2; exit 1; }
  done
  program "$programs/gpumemd" "$prefix/bin/gpumemd"
  program "$programs/gpumemctl" "$prefix/bin/gpumemctl"
  program "$programs/gpumem-mcp" "$prefix/bin/gpumem-mcp"
  program "$programs/libgpumem.so" "$library/$VERSION/libgpumem.so"
  chmod 644 "$library/$VERSION/libgpumem.so"
  put 755 "$root/packaging/versions" "$library/versions"
  "$library/versions" use "$VERSION"
  put 644 "$root/agent-lib/include/gpumem.h" "$prefix/include/gpumem.h"

  mkdir -p "$prefix/share"
  "$programs/gpumemctl" generate "$prefix/share"
  put 644 "$root/packaging/gpumemd.8" "$prefix/share/man/man8/gpumemd.8"
  put 644 "$root/packaging/gpumem-mcp.1" "$prefix/share/man/man1/gpumem-mcp.1"

  # Units name their programs by absolute paths.
  scratch=$(mktemp)
  trap 'rm -f "$scratch"' EXIT
  for unit in "$root"/systemd/*.service "$root"/systemd/*.socket; do
    sed "s|=/usr/bin/|=$AT/bin/|" "$unit" > "$scratch"
    put 644 "$scratch" "$prefix/lib/systemd/system/$(basename "$unit")"
  done
  put 644 "$root/systemd/gpumemd.sysusers.conf" "$prefix/lib/sysusers.d/gpumemd.conf"
  put 644 "$root/systemd/gpumemd.tmpfiles.conf" "$prefix/lib/tmpfiles.d/gpumemd.conf"

  # An existing configuration stays; the shipped file is also in the documents.
  [ -e "$sysconf/gpumemd/gpumemd.toml" ] || put 644 "$root/config/gpumemd.toml" "$sysconf/gpumemd/gpumemd.toml"

  documents=$prefix/share/doc/gpumem
  put 644 "$root/config/gpumemd.toml" "$documents/gpumemd.toml"
  tree "$root/systemd/drop-ins" "$documents/systemd"
  for folder in rules prometheus grafana kubernetes slurm; do
    tree "$root/config/$folder" "$documents/$folder"
  done
  tree "$root/systemd/drop-ins" "$documents/systemd"
  tree "$root/docs" "$documents/docs"
  # Licences of the code in the programs, and the list of components with checksums.
  if "$root/packaging/third_party.py" > "$scratch" 2> /dev/null; then
    put 644 "$scratch" "$documents/third-party.txt"
    "$root/packaging/sbom.py" "${PURL-pkg:generic/gpumemd}" "$VERSION" "gpumemd=$prefix/bin/gpumemd" \
      "gpumemctl=$prefix/bin/gpumemctl" "gpumem-mcp=$prefix/bin/gpumem-mcp" \
      "libgpumem.so=$library/$VERSION/libgpumem.so" > "$scratch"
    put 644 "$scratch" "$documents/sbom.cdx.json"
  else
    echo "left out, for want of python3, cargo or the crates' sources: third-party.txt, sbom.cdx.json" >&2
  fi
  for file in README.md ARCHITECTURE.md CHANGELOG.md LICENSE; do put 644 "$root/$file" "$documents/$file"; done
}

uninstall_all() {
  if [ -x "$library/versions" ]; then "$library/versions" drop; fi
  rm -f "$prefix/bin/gpumemd" "$prefix/bin/gpumemctl" "$prefix/bin/gpumem-mcp" "$prefix/include/gpumem.h" \
    "$library/versions" "$library/current"
  rm -f "$prefix"/share/man/man8/gpumemd.8 "$prefix"/share/man/man1/gpumemctl.1 \
    "$prefix"/share/man/man1/gpumemctl-*.1 "$prefix/share/man/man1/gpumem-mcp.1"
  rm -f "$prefix/share/bash-completion/completions/gpumemctl" "$prefix/share/zsh/site-functions/_gpumemctl" \
    "$prefix/share/fish/vendor_completions.d/gpumemctl.fish"
  rm -f "$prefix"/lib/systemd/system/gpumemd.service "$prefix"/lib/systemd/system/gpumemd-*.socket \
    "$prefix/lib/sysusers.d/gpumemd.conf" "$prefix/lib/tmpfiles.d/gpumemd.conf"
  rm -rf "$prefix/share/doc/gpumem"
  ( cd "$prefix" && rmdir -p --ignore-fail-on-non-empty lib/gpumem bin include lib/systemd/system lib/sysusers.d lib/tmpfiles.d \
    share/man/man1 share/man/man8 share/doc share/bash-completion/completions share/zsh/site-functions \
    share/fish/vendor_completions.d 2> /dev/null ) || :
  if [ -e "$sysconf/gpumemd" ]; then echo "kept: $sysconf/gpumemd"; fi
}

case ${1-} in
  install) install_all "${2:?the folder of the programs}" ;;
  uninstall) uninstall_all ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
