#!/bin/sh
# A compiler for cargo that counts edges in the crates below $FUZZ_COUNTED, but for build scripts, which run here and now; fuzz/run.py says how.
case ${CARGO_MANIFEST_DIR:-/}:" $* " in
  "$FUZZ_COUNTED"[/:]*" --target "*) exec "$@" $FUZZ_FLAGS ;;
  *) exec "$@" ;;
esac
