/* Device queries. */
#include "cudart.h"

#include <string.h>

/* cudaDeviceProp. Up to asyncEngineCount both layouts are written out; CUDA 13 dropped values that a driver knows only
 * at run time (clock rates, compute mode...). Other fields stay 0. */
#if MAJOR >= 13
#define PROP_BYTES 1008
enum { TOTAL = 288, SHARED_BLOCK = 296, REGS_BLOCK = 304, WARP = 308, PITCH = 312, THREADS_BLOCK = 320, BLOCK = 324,
       GRID = 336, CONSTANT = 352, MAJOR_AT = 360, MINOR_AT = 364, TEXTURE = 368, PROCESSORS = 384, MAP_HOST = 392,
       CONCURRENT = 560, BUS = 568, ENGINES = 584, UNIFIED = 588, WIDTH = 592, L2 = 596, THREADS_SM = 604,
       PRIORITIES = 608, SHARED_SM = 624, REGS_SM = 632, MANAGED = 636, COOPERATIVE = 668, SHARED_OPTIN = 672,
       BLOCKS_SM = 688, SHARED_RESERVED = 696, POOLS = 720, CLOCK = 0 };
#else
#define PROP_BYTES (MAJOR == 12 ? 1032 : 728)
enum { TOTAL = 288, SHARED_BLOCK = 296, REGS_BLOCK = 304, WARP = 308, PITCH = 312, THREADS_BLOCK = 320, BLOCK = 324,
       GRID = 336, CONSTANT = 352, MAJOR_AT = 360, MINOR_AT = 364, TEXTURE = 368, PROCESSORS = 388, MAP_HOST = 400,
       CONCURRENT = 576, BUS = 584, ENGINES = 600, UNIFIED = 604, WIDTH = 612, L2 = 616, THREADS_SM = 624,
       PRIORITIES = 628, SHARED_SM = 640, REGS_SM = 648, MANAGED = 652, COOPERATIVE = 688, SHARED_OPTIN = 696,
       BLOCKS_SM = 712, SHARED_RESERVED = 720, POOLS = 744, CLOCK = 348 };
#endif

static int attribute(int number, int device) {
    int value = 0;
    driver.cuDeviceGetAttribute(&value, number, device);
    return value;
}

static result properties(char *out, int device, size_t room) {
    char prop[1032] = {0};
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    /* Attribute of the driver, offset, bytes. */
    const struct {
        int number, at, size;
    } known[] = {{1, THREADS_BLOCK, 4}, {2, BLOCK, 4},      {3, BLOCK + 4, 4},  {4, BLOCK + 8, 4},   {5, GRID, 4},
                 {6, GRID + 4, 4},      {7, GRID + 8, 4},   {8, SHARED_BLOCK, 8}, {9, CONSTANT, 8},  {10, WARP, 4},
                 {11, PITCH, 8},        {12, REGS_BLOCK, 4}, {13, CLOCK, 4},    {14, TEXTURE, 8},    {16, PROCESSORS, 4},
                 {19, MAP_HOST, 4},     {31, CONCURRENT, 4}, {33, BUS, 4},      {37, WIDTH, 4},      {38, L2, 4},
                 {39, THREADS_SM, 4},   {40, ENGINES, 4},   {41, UNIFIED, 4},   {75, MAJOR_AT, 4},   {76, MINOR_AT, 4},
                 {78, PRIORITIES, 4},   {81, SHARED_SM, 8}, {82, REGS_SM, 4},   {83, MANAGED, 4},    {95, COOPERATIVE, 4},
                 {97, SHARED_OPTIN, 8}, {106, BLOCKS_SM, 4}, {111, SHARED_RESERVED, 8}, {115, POOLS, 4}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint64_t value = (uint64_t)attribute(known[i].number, device);
        if (known[i].at) memcpy(prop + known[i].at, &value, (size_t)known[i].size);
    }
    driver.cuDeviceTotalMem_v2((size_t *)(void *)(prop + TOTAL), device);
    driver.cuDeviceGetUuid_v2((uint8_t *)prop + 256, device);
    result r = driver.cuDeviceGetName(prop, 256, device);
    memcpy(out, prop, room);
    return r;
}
#if MAJOR >= 13
EXPORT result cudaGetDeviceProperties(void *out, int device) { ASK(properties(out, device, PROP_BYTES)); }
#else
EXPORT result cudaGetDeviceProperties(void *out, int device) { ASK(properties(out, device, 728)); }
#endif
EXPORT result cudaGetDeviceProperties_v2(void *out, int device) { ASK(properties(out, device, PROP_BYTES)); }

EXPORT result cudaDeviceGetAttribute(int *value, int number, int device) {
    ASK(driver.cuDeviceGetAttribute(value, number, device));
}
EXPORT result cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    ASK(driver.cuDeviceGetPCIBusId(text, bytes, device));
}
EXPORT result cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ASK(driver.cuDeviceCanAccessPeer(can, device, peer));
}
/* The peer's context is made if there is none. */
static result with_peer(int peer, int on) {
    int mine = thread_device;
    thread_device = peer;
    result r = use();
    thread_device = mine;
    if (r == OK) r = use();
    if (r != OK) return r;
    return on ? driver.cuCtxEnablePeerAccess(primary_of(peer), 0) : driver.cuCtxDisablePeerAccess(primary_of(peer));
}
EXPORT result cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)flags;
    RUN(with_peer(peer, 1));
}
EXPORT result cudaDeviceDisablePeerAccess(int peer) { RUN(with_peer(peer, 0)); }
EXPORT result cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    RUN((*least = 0, *greatest = -5, OK));
}
EXPORT result cudaDeviceSetLimit(int limit, size_t value) { RUN(driver.cuCtxSetLimit(limit, value)); }
EXPORT result cudaDeviceGetLimit(size_t *value, int limit) { RUN(driver.cuCtxGetLimit(value, limit)); }
EXPORT result cudaMemGetInfo(size_t *free, size_t *total) { RUN(driver.cuMemGetInfo_v2(free, total)); }
