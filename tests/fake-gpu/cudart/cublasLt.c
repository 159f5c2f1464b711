/* cuBLASLt: for every product there is one algorithm, which needs no workspace. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int cublasLtCreate(void **handle) {
    static _Atomic uintptr_t handles = 0x2000;
    *handle = (void *)(handles += 16);
    return 0;
}
/* A result: 64 bytes of algorithm, workspace, state, waves, reserved. */
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                          int wanted, void *results, int *found) {
    (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
    if (wanted > 0) memset(results, 0, 96);
    *found = wanted > 0;
    return 0;
}
EXPORT size_t cublasLtGetVersion(void) { return MAJOR * 10000; }
