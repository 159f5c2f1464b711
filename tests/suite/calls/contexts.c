/* Contexts of every kind, made and ended. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuDevicePrimaryCtxReset_v2(int device);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxDestroy_v2(void *context);
int cuCtxSetCurrent(void *context);
int cuGreenCtxCreate(void **context, void *description, int device, unsigned flags);
int cuGreenCtxDestroy(void *context);
int cuCtxFromGreenCtx(void **context, void *green);
int cuMemAlloc_v2(uint64_t *out, size_t bytes);
int cuMemFree_v2(uint64_t address);

static void check(int result, const char *what) {
    if (!result) return;
    fprintf(stderr, "%s: %d\n", what, result);
    exit(1);
}
#define CHECK(call) check(call, #call)

int main(void) {
    void *primary, *own, *green, *from_green;
    uint64_t address;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 1));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 1)); /* the same one */
    CHECK(cuCtxSetCurrent(primary));
    CHECK(cuMemAlloc_v2(&address, 1001));
    /* A part of the primary context, without a base cost. */
    CHECK(cuGreenCtxCreate(&green, NULL, 1, 1));
    CHECK(cuCtxFromGreenCtx(&from_green, green));
    CHECK(cuCtxSetCurrent(from_green));
    CHECK(cuMemAlloc_v2(&address, 1002));
    CHECK(cuMemFree_v2(address));
    CHECK(cuCtxSetCurrent(primary));
    CHECK(cuGreenCtxDestroy(green));
    CHECK(cuDevicePrimaryCtxRelease_v2(1));
    CHECK(cuMemAlloc_v2(&address, 1003));
    CHECK(cuDevicePrimaryCtxRelease_v2(1)); /* the last one */
    CHECK(cuCtxCreate_v2(&own, 0, 0));
    CHECK(cuMemAlloc_v2(&address, 1004));
    CHECK(cuCtxDestroy_v2(own));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 1)); /* a new one */
    CHECK(cuDevicePrimaryCtxReset_v2(1));
    if (cuCtxCreate_v2(&own, 0, 7) == 0) return 2; /* there is no such device */
    return 0;
}
