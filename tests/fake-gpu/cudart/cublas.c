/* cuBLAS: handles and their settings. Products are not computed. */
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int cublasCreate_v2(void **handle) {
    static _Atomic uintptr_t handles = 0x1000;
    *handle = (void *)(handles += 16);
    return 0;
}
EXPORT int cublasGetMathMode(void *handle, int *mode) {
    (void)handle;
    *mode = 0;
    return 0;
}
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) {
    (void)handle;
    *mode = 0;
    return 0;
}
EXPORT int cublasGetVersion_v2(void *handle, int *version) {
    (void)handle;
    *version = MAJOR * 10000;
    return 0;
}
