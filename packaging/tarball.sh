#!/bin/sh
# Makes an archive that runs from wherever it is unpacked; prints its path. The same files give the same archive, byte by byte.
#
#     tarball.sh PROGRAMS OUT
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
programs=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
VERSION=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2> /dev/null || echo 0)}
export VERSION
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=gpumemd-$VERSION-linux-$(uname -m)
tree=$work/$name
# Units need absolute paths: they use the path of the link described in INSTALL.
PREFIX='' AT=/opt/gpumemd DESTDIR=$tree "$root/packaging/install.sh" install "$programs"
rm -r "$tree/etc" # only /etc is read, and that is not ours to fill
cat > "$tree/INSTALL" << END
For yourself, nothing more is needed, from any folder and without root:

    bin/gpumemctl run -- python train.py

For all users of this machine, with a daemon that is always there (an upgrade: the same with the new folder; agents stay connected):

    ln -sfnT "\$PWD" /opt/gpumemd
    systemd-sysusers /opt/gpumemd/lib/sysusers.d/gpumemd.conf
    systemctl enable --now /opt/gpumemd/lib/systemd/system/gpumemd.service \\
      /opt/gpumemd/lib/systemd/system/gpumemd-agent.socket /opt/gpumemd/lib/systemd/system/gpumemd-control.socket \\
      /opt/gpumemd/lib/systemd/system/gpumemd-http.socket
    ln -s /opt/gpumemd/bin/gpumemctl /opt/gpumemd/bin/gpumemd /usr/local/bin/

Settings: share/doc/gpumem/gpumemd.toml, copied to /etc/gpumemd/. Processes get the library of their job's start: keep an old folder
until nobody has it any more, which lib/gpumem/versions tells.
END
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf - "$name" \
  | gzip -9n > "$out/$name.tar.gz"
echo "$out/$name.tar.gz"
