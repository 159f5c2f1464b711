/* Commands for the process's own memory. NAME is a new name, VALUE a number or a name. */
#include "words.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"
#include "names.h"

#define WORD(name) static int name(void)

/* ---- contexts ---- */

WORD(use_device) { /* ORDINAL: its primary context */
    void *context = NULL;
    device = (int)number();
    int result = cu.cuDevicePrimaryCtxRetain(&context, device);
    if (!result) use_context(context);
    return result;
}
WORD(release_device) { return cu.cuDevicePrimaryCtxRelease_v2((int)number()); }
WORD(reset_device) { return cu.cuDevicePrimaryCtxReset_v2((int)number()); }
WORD(context_new) { /* NAME: on the device in use, current from now on */
    uint64_t *name = new_name();
    int result = cu.cuCtxCreate_v2((void **)name, 0, device);
    if (!result) use_context((void *)(uintptr_t)*name);
    return result;
}
WORD(context_end) { return cu.cuCtxDestroy_v2(handle()); }
WORD(context_use) {
    use_context(handle());
    return OK;
}
WORD(green_new) { /* NAME: current from now on */
    uint64_t *name = new_name();
    void *context = NULL;
    int result = cu.cuGreenCtxCreate((void **)name, NULL, device, 1);
    if (!result) result = cu.cuCtxFromGreenCtx(&context, (void *)(uintptr_t)*name);
    if (!result) use_context(context);
    return result;
}
WORD(green_end) { return cu.cuGreenCtxDestroy(handle()); }
WORD(limit) { /* KIND VALUE */
    int kind = (int)number();
    return cu.cuCtxSetLimit(kind, number());
}
WORD(synchronize) { return cu.cuCtxSynchronize(); }

/* ---- names ---- */

WORD(tag) {
    name_is(word());
    return OK;
}
WORD(process_tag) {
    process_name_is(word());
    return OK;
}
WORD(retag) { /* ADDRESS PATH */
    uint64_t address = number();
    rename_at(address, word());
    return OK;
}

/* ---- direct ---- */

WORD(take) { /* NAME BYTES; says the address */
    uint64_t *name = new_name();
    int result = cu.cuMemAlloc_v2(name, number());
    say_number(*name);
    return result;
}
WORD(give) { return cu.cuMemFree_v2(number()); }
WORD(pitch) { /* NAME WIDTH HEIGHT; says the pitch */
    uint64_t *name = new_name();
    size_t width = number(), height = number(), bytes = 0;
    int result = cu.cuMemAllocPitch_v2(name, &bytes, width, height, 4);
    say_number(bytes);
    return result;
}
WORD(array) { /* NAME WIDTH HEIGHT, of floats */
    uint64_t *name = new_name();
    plane shape = {number(), number(), 0x20, 1};
    return cu.cuArrayCreate_v2((void **)name, &shape);
}
WORD(array_of) { /* NAME FORMAT CHANNELS WIDTH HEIGHT */
    uint64_t *name = new_name();
    uint32_t format = (uint32_t)number(), channels = (uint32_t)number();
    size_t width = number();
    plane shape = {width, number(), format, channels};
    return cu.cuArrayCreate_v2((void **)name, &shape);
}
static volume volume_of_line(void) {
    volume shape = {0, 0, 0, 0x20, 1, 0};
    shape.width = number();
    shape.height = number();
    shape.depth = number();
    return shape;
}
WORD(array3d) { /* NAME WIDTH HEIGHT DEPTH FLAGS */
    uint64_t *name = new_name();
    volume shape = volume_of_line();
    shape.flags = (uint32_t)number();
    return cu.cuArray3DCreate_v2((void **)name, &shape);
}
WORD(array_end) { return cu.cuArrayDestroy(handle()); }
WORD(mipmap) { /* NAME WIDTH HEIGHT DEPTH LEVELS */
    uint64_t *name = new_name();
    volume shape = volume_of_line();
    return cu.cuMipmappedArrayCreate((void **)name, &shape, (unsigned)number());
}
WORD(mipmap_end) { return cu.cuMipmappedArrayDestroy(handle()); }

/* ---- outside the sum ---- */

WORD(managed) { /* NAME BYTES */
    uint64_t *name = new_name();
    return cu.cuMemAllocManaged(name, number(), 1);
}
WORD(pinned) { /* NAME BYTES */
    uint64_t *name = new_name();
    return cu.cuMemAllocHost_v2((void **)name, number());
}
WORD(pinned_flags) { /* NAME BYTES */
    uint64_t *name = new_name();
    return cu.cuMemHostAlloc((void **)name, number(), 2);
}
WORD(pinned_end) { return cu.cuMemFreeHost(handle()); }
WORD(register_host) { /* NAME BYTES */
    uint64_t *name = new_name(), bytes = number();
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *name = (uint64_t)(uintptr_t)memory;
    return cu.cuMemHostRegister_v2(memory, bytes, 0);
}
WORD(register_end) { return cu.cuMemHostUnregister(handle()); }

/* ---- stream-ordered ---- */

WORD(stream_new) { /* NAME: the stream of the calls that follow */
    uint64_t *name = new_name();
    int result = cu.cuStreamCreate((void **)name, 1);
    if (!result) stream = (void *)(uintptr_t)*name;
    return result;
}
WORD(async) { /* NAME BYTES */
    uint64_t *name = new_name();
    return cu.cuMemAllocAsync(name, number(), stream);
}
WORD(async_from) { /* NAME POOL BYTES */
    uint64_t *name = new_name();
    void *pool = handle();
    return cu.cuMemAllocFromPoolAsync(name, number(), pool, stream);
}
WORD(async_end) { return cu.cuMemFreeAsync(number(), stream); }
WORD(pool_new) { /* NAME */
    uint64_t *name = new_name();
    pool_shape shape = {.type = 1, .handles = 1, .where = {1, device}};
    return cu.cuMemPoolCreate((void **)name, &shape);
}
WORD(pool_end) { return cu.cuMemPoolDestroy(handle()); }
WORD(pool_default) { /* NAME */
    uint64_t *name = new_name();
    return cu.cuDeviceGetDefaultMemPool((void **)name, device);
}
WORD(pool_keeps) { /* POOL BYTES: its release threshold */
    void *pool = handle();
    uint64_t bytes = number();
    return cu.cuMemPoolSetAttribute(pool, 4, &bytes);
}
WORD(pool_use) { return cu.cuDeviceSetMemPool(device, handle()); }
WORD(pool_trim) { /* POOL BYTES */
    void *pool = handle();
    return cu.cuMemPoolTrimTo(pool, number());
}

/* ---- handles and mappings ---- */

static int create(int on_host) {
    uint64_t *name = new_name();
    backing shape = {.type = 1, .handles = 1, .where = {on_host ? 2 : 1, on_host ? 0 : device}};
    return cu.cuMemCreate(name, number(), &shape, 0);
}
WORD(backing_new) { return create(0); } /* NAME BYTES */
WORD(backing_host) { return create(1); }
WORD(backing_end) { return cu.cuMemRelease(number()); }
WORD(backing_retain) { /* NAME ADDRESS OFFSET */
    uint64_t *name = new_name();
    char *address = handle();
    return cu.cuMemRetainAllocationHandle(name, address + number());
}
WORD(reserve) { /* NAME BYTES */
    uint64_t *name = new_name();
    return cu.cuMemAddressReserve(name, number(), 0, 0, 0);
}
WORD(reserve_end) { /* ADDRESS BYTES */
    uint64_t address = number();
    return cu.cuMemAddressFree(address, number());
}
WORD(map) { /* ADDRESS OFFSET BYTES HANDLE */
    uint64_t address = number(), offset = number(), bytes = number();
    grant access = {{1, device}, 3};
    int result = cu.cuMemMap(address + offset, bytes, 0, number(), 0);
    return result ? result : cu.cuMemSetAccess(address + offset, bytes, &access, 1);
}
WORD(unmap) { /* ADDRESS OFFSET BYTES */
    uint64_t address = number(), offset = number();
    return cu.cuMemUnmap(address + offset, number());
}

/* ---- graphs ---- */

WORD(graph_new) {
    uint64_t *name = new_name();
    return cu.cuGraphCreate((void **)name, 0);
}
static memory_node node_of_line(void) {
    memory_node node = {.pool = {.type = 1, .where = {1, device}}};
    node.bytes = number();
    return node;
}
WORD(graph_alloc) { /* NAME GRAPH BYTES */
    uint64_t *name = new_name();
    void *graph = handle(), *made;
    memory_node node = node_of_line();
    int result = cu.cuGraphAddMemAllocNode(&made, graph, NULL, 0, &node);
    *name = node.address;
    return result;
}
WORD(graph_node) { /* NAME GRAPH BYTES: the general call */
    uint64_t *name = new_name();
    void *graph = handle(), *made;
    any_node node = {.type = 10};
    node.alloc = node_of_line();
    int result = cu.cuGraphAddNode(&made, graph, NULL, 0, &node);
    *name = node.alloc.address;
    return result;
}
WORD(graph_free) { /* GRAPH ADDRESS */
    void *graph = handle(), *made;
    return cu.cuGraphAddMemFreeNode(&made, graph, NULL, 0, number());
}
WORD(graph_end) { return cu.cuGraphDestroy(handle()); }
WORD(graph_make) { /* NAME GRAPH */
    uint64_t *name = new_name();
    return cu.cuGraphInstantiateWithFlags((void **)name, handle(), 0);
}
WORD(graph_launch) { return cu.cuGraphLaunch(handle(), stream); }
WORD(made_end) { return cu.cuGraphExecDestroy(handle()); }
WORD(graph_trim) { return cu.cuDeviceGraphMemTrim(device); }
WORD(capture) { return cu.cuStreamBeginCapture_v2(stream, 0); }
WORD(capture_end) { /* NAME: the graph */
    uint64_t *name = new_name();
    return cu.cuStreamEndCapture(stream, (void **)name);
}

/* ---- code ---- */

WORD(module_new) {
    uint64_t *name = new_name();
    return cu.cuModuleLoadData((void **)name, "a module's source");
}
WORD(module_end) { return cu.cuModuleUnload(handle()); }
WORD(library_new) {
    uint64_t *name = new_name();
    return cu.cuLibraryLoadData((void **)name, "a library's source", NULL, NULL, 0, NULL, NULL, 0);
}
WORD(library_end) { return cu.cuLibraryUnload(handle()); }

/* ---- a framework's pool ---- */

WORD(caching) { /* NAME */
    uint64_t *name = new_name();
    *name = caching_new("caching", device);
    return OK;
}
WORD(segment) { /* POOL ADDRESS BYTES */
    uint64_t pool = number(), address = number();
    segment_new(pool, address, number());
    return OK;
}
WORD(segment_done) {
    uint64_t pool = number(), address = number();
    segment_end(pool, address, number());
    return OK;
}
WORD(block) { /* POOL ADDRESS OFFSET BYTES */
    uint64_t pool = number(), address = number(), offset = number();
    block_new(pool, address + offset, number());
    return OK;
}
WORD(block_done) { /* POOL ADDRESS OFFSET */
    uint64_t pool = number(), address = number();
    block_end(pool, address + number());
    return OK;
}

const command memory_words[] = {
    {"device", use_device}, {"device-release", release_device}, {"device-reset", reset_device},
    {"context", context_new}, {"context-end", context_end}, {"context-use", context_use},
    {"green", green_new}, {"green-end", green_end}, {"limit", limit}, {"synchronize", synchronize},
    {"tag", tag}, {"process-tag", process_tag}, {"retag", retag},
    {"alloc", take}, {"free", give}, {"pitch", pitch},
    {"array", array}, {"array-of", array_of}, {"array3d", array3d}, {"array-end", array_end}, {"mipmap", mipmap}, {"mipmap-end", mipmap_end},
    {"managed", managed}, {"pinned", pinned}, {"pinned-flags", pinned_flags}, {"pinned-end", pinned_end},
    {"register", register_host}, {"register-end", register_end},
    {"stream", stream_new}, {"async", async}, {"async-from", async_from}, {"async-end", async_end},
    {"pool", pool_new}, {"pool-end", pool_end}, {"pool-default", pool_default}, {"pool-keeps", pool_keeps},
    {"pool-use", pool_use}, {"pool-trim", pool_trim},
    {"create", backing_new}, {"create-host", backing_host}, {"release", backing_end}, {"retain", backing_retain},
    {"reserve", reserve}, {"reserve-end", reserve_end}, {"map", map}, {"unmap", unmap},
    {"graph", graph_new}, {"graph-alloc", graph_alloc}, {"graph-node", graph_node}, {"graph-free", graph_free},
    {"graph-end", graph_end}, {"graph-make", graph_make}, {"graph-launch", graph_launch}, {"made-end", made_end},
    {"graph-trim", graph_trim}, {"capture", capture}, {"capture-end", capture_end},
    {"module", module_new}, {"module-end", module_end}, {"library", library_new}, {"library-end", library_end},
    {"caching", caching}, {"segment", segment}, {"segment-end", segment_done}, {"block", block}, {"block-end", block_done},
    {NULL, NULL},
};
