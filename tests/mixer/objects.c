/* One piece of memory of a random kind: allocated, sometimes changed, and freed in one of the possible ways. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "names.h"
#include "soak.h"

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define GRANULE (2 * MIB)

enum kind { SMALL, LARGE, PITCHED, ARRAY, MIPMAP, MANAGED, PINNED, REGISTERED, ASYNC, POOLED, BACKED, GRAPH, CAPTURED,
            MODULE, FOREIGN, TEAM, SEGMENT, KINDS };
/* Frequency in percent; the rest is SMALL. */
static const int share[KINDS] = {[LARGE] = 12, [PITCHED] = 5, [ARRAY] = 4, [MIPMAP] = 2, [MANAGED] = 3, [PINNED] = 3,
                                 [REGISTERED] = 3, [ASYNC] = 18, [POOLED] = 10, [BACKED] = 6, [GRAPH] = 1,
                                 [CAPTURED] = 1, [MODULE] = 1, [FOREIGN] = 2, [TEAM] = 1, [SEGMENT] = 4};

struct object {
    enum kind kind;
    int ordinal, parts; /* parts: references of a handle, blocks of a segment */
    uint64_t what, at, bytes;
    void *host;
};

uint64_t roll(worker *w, uint64_t below) {
    uint64_t x = w->state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (x ^ x >> 31) % below;
}

static int counted(worker *w, int result) {
    w->calls++;
    w->failed += result != 0;
    return result;
}
#define CALL(call) counted(w, cu.call)

static enum kind kind_of(worker *w) {
    int n = (int)roll(w, 100);
    for (int kind = LARGE; kind < KINDS; kind++)
        if ((n -= share[kind]) < 0) return (enum kind)kind;
    return SMALL;
}

/* ---- handles and mappings ---- */

static int map(worker *w, object *o) {
    grant access = {{1, o->ordinal}, 3};
    int result = CALL(cuMemMap(o->at, o->bytes, 0, o->what, 0));
    return result ? result : CALL(cuMemSetAccess(o->at, o->bytes, &access, 1));
}

static int back(worker *w, object *o) {
    backing shape = {.type = 1, .where = {1, o->ordinal}};
    o->bytes = (1 + roll(w, 4)) * GRANULE;
    int result = CALL(cuMemCreate(&o->what, o->bytes, &shape, 0));
    if (result) return result;
    o->parts = 1;
    result = CALL(cuMemAddressReserve(&o->at, o->bytes, 0, 0, 0));
    if (result || (result = map(w, o))) abort();
    switch (roll(w, 4)) {
    case 0: /* the mapping alone keeps it */
        CALL(cuMemRelease(o->what));
        o->parts = 0;
        break;
    case 1: {
        uint64_t again;
        if (!CALL(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)o->at))) o->parts = 2;
    }
    }
    return OK;
}

static void unback(worker *w, object *o) {
    int first = (int)roll(w, 2);
    while (first && o->parts) CALL(cuMemRelease(o->what)), o->parts--;
    CALL(cuMemUnmap(o->at, o->bytes));
    while (o->parts) CALL(cuMemRelease(o->what)), o->parts--;
    CALL(cuMemAddressFree(o->at, o->bytes));
}

/* ---- graphs ---- */

/* Their launches are reported to no client, so only the machine knows their names: all start with the same prefix. */
static int instantiate(worker *w, object *o, void *graph) {
    int result = CALL(cuGraphInstantiateWithFlags((void **)&o->what, graph, 0));
    if (!result) cu.cuGraphLaunch((void *)(uintptr_t)o->what, NULL);
    cu.cuGraphDestroy(graph);
    return result;
}

static uint64_t node_bytes(worker *w) { return 512 * (1 + roll(w, 512)); }

static int graph(worker *w, object *o) {
    void *graph, *made;
    cu.cuGraphCreate(&graph, 0);
    for (int nodes = 1 + (int)roll(w, 3); nodes; nodes--) {
        memory_node node = {.pool = {.type = 1, .where = {1, o->ordinal}}, .bytes = node_bytes(w)};
        if (!CALL(cuGraphAddMemAllocNode(&made, graph, NULL, 0, &node)) && roll(w, 2))
            CALL(cuGraphAddMemFreeNode(&made, graph, NULL, 0, node.address));
    }
    return instantiate(w, o, graph);
}

static int capture(worker *w, object *o) {
    void *stream, *graph;
    uint64_t address;
    cu.cuStreamCreate(&stream, 1);
    cu.cuStreamBeginCapture_v2(stream, 0);
    if (!CALL(cuMemAllocAsync(&address, node_bytes(w), stream)) && roll(w, 2))
        CALL(cuMemFreeAsync(address, stream));
    cu.cuStreamEndCapture(stream, &graph);
    cu.cuStreamDestroy_v2(stream);
    return instantiate(w, o, graph);
}

/* ---- a segment of a framework's pool, with blocks in its quarters ---- */

static int segment(worker *w, object *o) {
    uint64_t pool = grounds[o->ordinal].caching;
    o->bytes = GRANULE * (1 + roll(w, 2));
    int result = CALL(cuMemAlloc_v2(&o->what, o->bytes));
    if (result) return result;
    segment_new(pool, o->what, o->bytes);
    for (int i = 0; i < 4; i++)
        if (roll(w, 2)) {
            block_new(pool, o->what + (uint64_t)i * o->bytes / 4, 512 + roll(w, o->bytes / 4 - 512));
            o->parts |= 1 << i;
        }
    return OK;
}

static void unsegment(worker *w, object *o) {
    uint64_t pool = grounds[o->ordinal].caching;
    for (int i = 0; i < 4; i++)
        if (o->parts >> i & 1) block_end(pool, o->what + (uint64_t)i * o->bytes / 4);
    segment_end(pool, o->what, o->bytes);
    CALL(cuMemFree_v2(o->what));
}

/* ---- all objects ---- */

static int begin(worker *w, object *o) {
    const ground *g = &grounds[o->ordinal];
    uint64_t *what = &o->what;
    size_t pitch;
    plane flat = {256 + roll(w, 1024), 1 + roll(w, 1024), 0x20, 1};
    volume deep = {64 + roll(w, 64), 1 + roll(w, 64), 1 + roll(w, 8), 0x20, 1, 0};
    foreign other = {.type = 1, .bytes = MIB + roll(w, MIB)};
    team shape = {.devices = 2, .bytes = GRANULE, .handles = 1};
    switch (o->kind) {
    case SMALL: return CALL(cuMemAlloc_v2(what, 1 + roll(w, 64 * KIB)));
    case LARGE: return CALL(cuMemAlloc_v2(what, MIB + roll(w, 5 * MIB)));
    case PITCHED: return CALL(cuMemAllocPitch_v2(what, &pitch, 1 + roll(w, 4096), 1 + roll(w, 512), 4));
    case ARRAY: return roll(w, 2) ? CALL(cuArrayCreate_v2((void **)what, &flat)) : CALL(cuArray3DCreate_v2((void **)what, &deep));
    case MIPMAP: return CALL(cuMipmappedArrayCreate((void **)what, &deep, 4));
    case MANAGED: return CALL(cuMemAllocManaged(what, 4096 + roll(w, 256 * KIB), 1));
    case PINNED: return roll(w, 2) ? CALL(cuMemAllocHost_v2(&o->host, 1 + roll(w, 64 * KIB))) : CALL(cuMemHostAlloc(&o->host, 4096, 2));
    case REGISTERED:
        o->bytes = 4096 * (1 + roll(w, 16));
        if (!(o->host = malloc(o->bytes))) abort();
        return CALL(cuMemHostRegister_v2(o->host, o->bytes, 0));
    case ASYNC: return CALL(cuMemAllocAsync(what, 1 + roll(w, 128 * KIB), NULL));
    case POOLED: return CALL(cuMemAllocFromPoolAsync(what, 1 + roll(w, 128 * KIB), g->own_pool, NULL));
    case BACKED: return back(w, o);
    case GRAPH: return graph(w, o);
    case CAPTURED: return capture(w, o);
    case MODULE: return roll(w, 2) ? CALL(cuModuleLoadData((void **)what, "source"))
                                   : (o->parts = 1, CALL(cuLibraryLoadData((void **)what, "source", NULL, NULL, 0, NULL, NULL, 0)));
    case FOREIGN: return CALL(cuImportExternalMemory((void **)what, &other));
    case TEAM: return CALL(cuMulticastCreate(what, &shape));
    case SEGMENT: return segment(w, o);
    default: abort();
    }
}

object *object_new(worker *w, int ordinal) {
    object *o = calloc(1, sizeof *o);
    if (!o) abort();
    o->kind = kind_of(w);
    o->ordinal = ordinal;
    char name[256] = "";
    int is_graph = o->kind == GRAPH || o->kind == CAPTURED;
    if (is_graph) {
        memcpy(name, name_now(), sizeof name);
        name_is("graph");
    }
    int result = begin(w, o);
    if (is_graph) name_is(name);
    if (!result) return o;
    if (o->kind == REGISTERED) free(o->host);
    free(o);
    return NULL;
}

void object_end(worker *w, object *o) {
    void *what = (void *)(uintptr_t)o->what; /* NOLINT: handles are numbers here */
    switch (o->kind) {
    case SMALL: CALL(cuMemFree_v2(o->what)); break;
    case LARGE:
        if (!roll(w, 4)) rename_at(o->what, "soak/renamed");
        if (!roll(w, 8)) CALL(cuMemFreeHost(what)); /* no allocation of that kind: refused */
        CALL(cuMemFree_v2(o->what));
        break;
    case PITCHED:
    case MANAGED: CALL(cuMemFree_v2(o->what)); break;
    case ARRAY:
        if (!roll(w, 8)) CALL(cuMemFree_v2(o->what + 1));
        CALL(cuArrayDestroy(what));
        break;
    case MIPMAP: CALL(cuMipmappedArrayDestroy(what)); break;
    case PINNED: CALL(cuMemFreeHost(o->host)); break;
    case REGISTERED:
        CALL(cuMemHostUnregister(o->host));
        free(o->host);
        break;
    case ASYNC:
    case POOLED:
        if (roll(w, 4))
            CALL(cuMemFreeAsync(o->what, NULL));
        else
            CALL(cuMemFree_v2(o->what));
        break;
    case BACKED:
        if (!roll(w, 4)) { /* elsewhere, with the same memory behind it */
            uint64_t handle;
            if (!CALL(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)o->at))) {
                CALL(cuMemUnmap(o->at, o->bytes));
                CALL(cuMemAddressFree(o->at, o->bytes));
                o->what = handle;
                o->parts++;
                if (CALL(cuMemAddressReserve(&o->at, o->bytes, 0, 0, 0)) || map(w, o)) abort();
            }
        }
        unback(w, o);
        break;
    case GRAPH:
    case CAPTURED: CALL(cuGraphExecDestroy(what)); break;
    case MODULE:
        if (o->parts)
            CALL(cuLibraryUnload(what));
        else
            CALL(cuModuleUnload(what));
        break;
    case FOREIGN: CALL(cuDestroyExternalMemory(what)); break;
    case TEAM: CALL(cuMemRelease(o->what)); break;
    case SEGMENT: unsegment(w, o); break;
    default: abort();
    }
    free(o);
}

int object_device(const object *o) { return o->ordinal; }

/* Nothing of the object may be returned to the driver again, except its addresses and parts without a device. */
void object_lost(object *o) {
    if (o->kind == BACKED) cu.cuMemAddressFree(o->at, o->bytes);
    if (o->kind == TEAM) cu.cuMemRelease(o->what);
    if (o->kind == REGISTERED) free(o->host);
    free(o);
}

void misuse(worker *w, int ordinal) {
    backing shape = {.type = 1, .where = {1, ordinal}};
    uint64_t value;
    size_t pitch;
    switch (roll(w, 12)) {
    case 0: CALL(cuMemAlloc_v2(&value, 1ull << 42)); break;
    case 1: CALL(cuMemCreate(&value, 1ull << 42, &shape, 0)); break;
    case 2: CALL(cuMemAllocAsync(&value, 1ull << 42, NULL)); break;
    case 3: CALL(cuMemAllocPitch_v2(&value, &pitch, 1ull << 32, 1ull << 10, 4)); break;
    case 4: CALL(cuMemFree_v2(0x10)); break;
    case 5: CALL(cuMemFreeAsync(0x10, NULL)); break;
    case 6: CALL(cuMemRelease(0x10)); break;
    case 7: CALL(cuMemUnmap(GRANULE, GRANULE)); break;
    case 8: CALL(cuArrayDestroy((void *)0x10)); break;
    case 9: CALL(cuIpcCloseMemHandle(0x10)); break;
    case 10: CALL(cuMemCreate(&value, GRANULE + 1, &shape, 0)); break;
    default: CALL(cuMemFree_v2(0)); break; /* succeeds and frees nothing */
    }
}

void pass_by(worker *w, int ordinal) {
    void *context;
    uint64_t taken[4];
    if (CALL(cuCtxCreate_v2(&context, 0, ordinal))) return;
    cu.cuCtxSetCurrent(context);
    for (int i = 0; i < 4; i++)
        if (CALL(cuMemAlloc_v2(&taken[i], i % 2 ? 1 + roll(w, 64 * KIB) : MIB + roll(w, MIB)))) taken[i] = 0;
    CALL(cuMemFree_v2(taken[roll(w, 4)]));
    CALL(cuCtxDestroy_v2(context));
    cu.cuCtxSetCurrent(grounds[ordinal].context);
}
