#!/bin/sh
# Checks the crates in Cargo.lock and of the fuzz targets against RustSec's database of vulnerabilities, with cargo-deny.
#
#     advisories.sh TARGET
#
# DB: a clone of https://github.com/RustSec/advisory-db, for machines that cannot fetch it. Its age is printed, because it lacks
# later vulnerabilities.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1/advisories"
target=$(cd "$1" && pwd)
# The cargo-deny of the tests, if no other is installed.
PATH=$PATH:$target/tools/cargo-deny/bin
command -v cargo-deny > /dev/null || { echo "there is no cargo-deny: cargo install cargo-deny" >&2; exit 1; }
config=$root/deny.toml
offline=''
if [ -n "${DB-}" ]; then
  # cargo-deny derives this folder name from the address.
  work=$target/advisories
  rm -rf "$work/advisory-db-3157b0e258782691"
  git clone --quiet "$DB" "$work/advisory-db-3157b0e258782691"
  config=$work/deny.toml
  { cat "$root/deny.toml"; printf '\n[advisories]\ndb-path = "%s"\n' "$work"; } > "$config"
  offline=--offline
  echo "the copy of the database is of $(git -C "$DB" log -1 --format=%cs)"
fi
for manifest in Cargo.toml fuzz/Cargo.toml; do
  cargo-deny --manifest-path "$root/$manifest" --locked $offline --config "$config" check advisories || {
    [ -n "$offline" ] || echo "where the database cannot be fetched: make advisories DB=CLONE-OF-IT" >&2
    exit 1
  }
done
