#!/bin/sh
# A compiler for cargo that counts edges in this project's crates; fuzz/run.py says where they are and how.
case ${CARGO_MANIFEST_DIR:-/} in
  "$FUZZ_ROOT"/*) exec "$@" $FUZZ_FLAGS ;;
  *) exec "$@" ;;
esac
