#!/bin/sh
# Compiler wrapper for cargo that counts edges in the crates below $FUZZ_COUNTED, except build scripts; see fuzz/run.py.
case ${CARGO_MANIFEST_DIR:-/}:" $* " in
  "$FUZZ_COUNTED"[/:]*" --target "*) exec "$@" $FUZZ_FLAGS ;;
  *) exec "$@" ;;
esac
