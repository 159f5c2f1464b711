#!/usr/bin/env bash
# Runs `make race`: the agent's ring, names and thread slots under loom, its threaded tests under ThreadSanitizer, C
# programs with the agent under valgrind. Takes minutes. A missing tool is reported, and fails with
# GPUMEM_TOOLS_REQUIRED=1.
set -euo pipefail
cd "$(dirname "$0")/../.."
CARGO=${CARGO:-cargo}
TARGET=$(realpath -m "${CARGO_TARGET_DIR:-target}")
MACHINE=/dev/shm/gpumem-race-$$
missing() {
  echo "skipped: $1"
  [ -z "${GPUMEM_TOOLS_REQUIRED:-}" ] || exit 1
}

echo "loom"
(cd tests/races && RUSTFLAGS="--cfg loom" $CARGO test --release -q --locked --target-dir "$TARGET/loom")

echo "ThreadSanitizer"
host=$(rustc -vV | sed -n 's/^host: //p')
if [ "$host" = x86_64-unknown-linux-gnu ]; then
  # The standard library is as it was shipped, not instrumented: tsan.supp. All of the rest takes ten times as long and more.
  RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
    TSAN_OPTIONS="suppressions=$PWD/tests/races/tsan.supp" \
    $CARGO test -q --locked --target "$host" --target-dir "$TARGET/tsan" -p gpumem-agent --test suite -- racing:: scoping:: full_ring:: blind::
else
  missing "ThreadSanitizer on $host"
fi

echo "valgrind"
if command -v valgrind > /dev/null; then
  $CARGO build -q --locked -p gpumem-agent
  make -s fake-gpu
  fake=$TARGET/fake-gpu
  trap 'rm -f "$MACHINE"; rm -rf "$TARGET/race-programs"' EXIT
  "$fake/bin/fake-gpu" init "$MACHINE" memory=8G > /dev/null
  mkdir -p "$TARGET/race-programs"
  for example in train pool_owner; do
    cc -O1 -g -I agent-lib/include "examples/$example.c" -ldl -o "$TARGET/race-programs/$example"
  done
  export GPUMEM_SIM=$MACHINE LD_LIBRARY_PATH=$fake/lib GPUMEM_SOCKET=$TARGET/nobody.sock
  export CUDA_INJECTION64_PATH=$TARGET/debug/libgpumem.so
  # how it ends, and the program with its words
  while read -r end program; do
    code=0
    (cd "$TARGET/race-programs" && valgrind -q --error-exitcode=99 --suppressions="$OLDPWD/tests/races/valgrind.supp" $program \
      < /dev/null > "$TARGET/valgrind.txt" 2>&1) || code=$?
    [ "$code" = "$end" ] || { cat "$TARGET/valgrind.txt"; echo "$program ended with $code"; exit 1; }
    echo "  $program"
  done << END
0 $TARGET/race-programs/train
0 $TARGET/race-programs/pool_owner
7 $fake/bin/host plain
0 $fake/bin/host tags
0 $fake/bin/host fork
0 $fake/bin/host threads
END
else
  missing "valgrind is not here"
fi
