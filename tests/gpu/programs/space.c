/* Commands for physical handles and their mappings, driver pools, and graphs. */
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda.h"

static void *pools[16], *graph, *executable;
static int pool_count;

static allocation_properties here(void) {
    allocation_properties p = {.type = 1, .where = {1, device}};
    return p;
}

/* With `shared`, it can be exported as a file descriptor (type 1). */
static void vmm_create(void) {
    allocation_properties p = here();
    size_t bytes = number(), unit = 0;
    p.handle_types = number() ? 1 : 0;
    uint64_t handle = 0;
    cuMemGranularity(&unit, &p, 0);
    if (unit) bytes = (bytes + unit - 1) / unit * unit;
    mark();
    result r = cuMemCreate(&handle, bytes, &p, 0);
    uint64_t since = began();
    int id = r ? -1 : keep(HANDLE, handle, bytes);
    reply(r, since, "\"id\":%d,\"bytes\":%zu,\"granularity\":%zu", id, bytes, unit);
}

static void vmm_map(void) {
    row *handle = kept(number());
    address where = 0;
    if (!handle || handle->kind != HANDLE) {
        reply(-1, began(), "\"error\":\"no such handle\"");
        return;
    }
    uint64_t what = handle->what, bytes = handle->bytes ? handle->bytes : handle->span;
    result r = cuMemReserve(&where, bytes, 0, 0, 0);
    if (!r) r = cuMemMap(where, bytes, 0, what, 0);
    access_descriptor open = {{1, device}, 3};
    if (!r) r = cuMemSetAccess(where, bytes, &open, 1);
    uint64_t since = began();
    int id = r ? -1 : keep(MAPPING, where, bytes);
    reply(r, since, "\"id\":%d,\"address\":%llu", id, (unsigned long long)where);
}

/* One more reference to the handle behind a mapping; its bytes are those of the handle, so they are not booked again. */
static void vmm_retain(void) {
    row *mapping = kept(number());
    uint64_t handle = 0;
    result r = mapping ? cuMemRetain(&handle, (void *)mapping->what) : -1;
    uint64_t since = began();
    int id = r ? -1 : keep(HANDLE, handle, 0);
    reply(r, since, "\"id\":%d,\"handle\":%llu", id, (unsigned long long)handle);
}

static void vmm_export(void) {
    row *handle = kept(number());
    int descriptor = -1;
    result r = handle ? cuMemExport(&descriptor, handle->what, 1, 0) : -1;
    reply(r, began(), "\"descriptor\":%d", descriptor);
}

static void vmm_close(void) { done(close((int)number())); }

/* Imports a handle that another process exported, by its pid and descriptor. */
static void vmm_import(void) {
    int pid = (int)number(), theirs = (int)number(), ours = -1;
    uint64_t bytes = number(), handle = 0;
    int process = (int)syscall(SYS_pidfd_open, pid, 0);
    if (process >= 0) ours = (int)syscall(SYS_pidfd_getfd, process, theirs, 0);
    if (ours < 0) {
        reply(-1, began(), "\"error\":\"no descriptor of that process\"");
        return;
    }
    mark();
    result r = cuMemImport(&handle, (void *)(intptr_t)ours, 1);
    uint64_t since = began();
    close(ours);
    close(process);
    int id = r ? -1 : keep(HANDLE, handle, 0);
    if (!r) kept((uint64_t)id)->span = bytes;
    reply(r, since, "\"id\":%d", id);
}

static void *pool_of(uint64_t number) {
    void *found = NULL;
    if (number == 0) {
        cuDefaultPool(&found, device);
        return found;
    }
    return number <= 16 ? pools[number - 1] : NULL;
}

static void async(void) {
    size_t bytes = number();
    uint64_t pool = number();
    if (!stream) cuStreamCreate(&stream, 1);
    address where = 0;
    mark();
    result r = pool ? cuMemAllocFromPool(&where, bytes, pool_of(pool), stream) : cuMemAllocAsync(&where, bytes, stream);
    uint64_t since = began();
    int id = r ? -1 : keep(ASYNC, where, bytes);
    reply(r, since, "\"id\":%d,\"address\":%llu", id, (unsigned long long)where);
}

static void synchronize(void) {
    result r = stream ? cuStreamSynchronize(stream) : 0;
    if (!r) r = cuCtxSynchronize();
    done(r);
}

static void pool_create(void) {
    pool_properties p = {.type = 1, .where = {1, device}};
    void *made = NULL;
    result r = pool_count < 16 ? cuPoolCreate(&made, &p) : -1;
    if (!r) pools[pool_count++] = made;
    reply(r, began(), "\"pool\":%d", pool_count);
}

static void pool_destroy(void) {
    uint64_t which = number();
    void *pool = which ? pool_of(which) : NULL;
    result r = pool ? cuPoolDestroy(pool) : -1;
    if (!r) pools[which - 1] = NULL;
    done(r);
}

static void pool_state(void) {
    void *pool = pool_of(number());
    uint64_t reserved = 0, used = 0, threshold = 0;
    result r = pool ? cuPoolGet(pool, 5, &reserved) : -1;
    if (!r) r = cuPoolGet(pool, 7, &used);
    if (!r) r = cuPoolGet(pool, 4, &threshold);
    reply(r, began(), "\"reserved\":%llu,\"used\":%llu,\"threshold\":%llu", (unsigned long long)reserved,
          (unsigned long long)used, (unsigned long long)threshold);
}

static void pool_threshold(void) {
    void *pool = pool_of(number());
    uint64_t bytes = number();
    done(pool ? cuPoolSet(pool, 4, &bytes) : -1);
}

static void pool_trim(void) {
    void *pool = pool_of(number());
    done(pool ? cuPoolTrim(pool, number()) : -1);
}

/* A graph that allocates, and on request frees again; `launch_graph` runs it. */
static void graph_make(void) {
    memory_node node = {.pool = {.type = 1, .where = {1, device}}, .bytes = number()};
    int gives_back = (int)number();
    void *take = NULL, *back = NULL;
    mark();
    result r = cuGraphCreate(&graph, 0);
    if (!r) r = cuGraphAddAlloc(&take, graph, NULL, 0, &node);
    if (!r && gives_back) r = cuGraphAddFree(&back, graph, &take, 1, node.where);
    if (!r) r = cuGraphInstantiate(&executable, graph, 0);
    reply(r, began(), "\"address\":%llu", (unsigned long long)node.where);
}

static void graph_launch(void) {
    if (!stream) cuStreamCreate(&stream, 1);
    result r = executable ? cuGraphLaunch(executable, stream) : -1;
    if (!r) r = cuStreamSynchronize(stream);
    done(r);
}

static void graph_state(void) {
    uint64_t used = 0, reserved = 0;
    result r = cuGraphMemory(device, 0, &used);
    if (!r) r = cuGraphMemory(device, 2, &reserved);
    reply(r, began(), "\"reserved\":%llu,\"used\":%llu", (unsigned long long)reserved, (unsigned long long)used);
}

static void graph_destroy(void) {
    result r = executable ? cuGraphExecDestroy(executable) : 0;
    if (!r && graph) r = cuGraphDestroy(graph);
    executable = graph = NULL;
    done(r);
}

static void graph_trim(void) { done(cuGraphTrim(device)); }

/* A stream-ordered allocation under capture becomes a node of a graph and allocates nothing. With KEEP, `graph_launch`
 * runs that graph. */
static void captured(void) {
    size_t bytes = number();
    int keep_it = (int)number();
    address where = 0;
    void *made = NULL;
    if (!stream) cuStreamCreate(&stream, 1);
    if (!cuStreamBeginCapture || !cuStreamEndCapture) {
        done(NOT_FOUND);
        return;
    }
    result r = cuStreamBeginCapture(stream, 2);
    if (!r) r = cuMemAllocAsync(&where, bytes, stream);
    if (!r) r = cuMemFreeAsync(where, stream);
    result ended = cuStreamEndCapture(stream, &made);
    if (!r) r = ended;
    if (!r && keep_it) r = cuGraphInstantiate(&executable, made, 0);
    if (!r && keep_it) graph = made;
    if (made && graph != made) cuGraphDestroy(made);
    reply(r, began(), "\"address\":%llu", (unsigned long long)where);
}

const command space_commands[] = {
    {"vmm_create", vmm_create, "BYTES [SHARED]"}, {"vmm_map", vmm_map, "HANDLE_ID"}, {"vmm_retain", vmm_retain, "MAPPING_ID"},
    {"vmm_export", vmm_export, "HANDLE_ID"}, {"vmm_close", vmm_close, "DESCRIPTOR"},
    {"vmm_import", vmm_import, "PID DESCRIPTOR BYTES"},
    {"async", async, "BYTES [POOL]"}, {"sync", synchronize, ""}, {"pool_create", pool_create, ""},
    {"pool_destroy", pool_destroy, "POOL"}, {"pool_state", pool_state, "POOL"},
    {"pool_threshold", pool_threshold, "POOL BYTES"}, {"pool_trim", pool_trim, "POOL BYTES"},
    {"graph", graph_make, "BYTES FREES"}, {"graph_launch", graph_launch, ""}, {"graph_state", graph_state, ""},
    {"graph_destroy", graph_destroy, ""}, {"graph_trim", graph_trim, ""}, {"captured", captured, "BYTES [KEEP]"},
    {NULL, NULL, NULL},
};
