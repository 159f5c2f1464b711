#!/bin/sh
# A compiler for cargo that counts edges in this project's crates, but for build scripts, which run here and now; fuzz/run.py says how.
case ${CARGO_MANIFEST_DIR:-/}:" $* " in
  "$FUZZ_ROOT"/*" --target "*) exec "$@" $FUZZ_FLAGS ;;
  *) exec "$@" ;;
esac
