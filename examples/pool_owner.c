/* An allocator as in a model server, which reports its pools and blocks. Its memory comes from the driver's virtual memory
 * management; it holds weights and a cache. During sleep it returns the memory and keeps the addresses and the weights' block.
 *
 *     cc -I../agent-lib/include pool_owner.c -ldl -o pool_owner
 *     gpumemctl run -- ./pool_owner
 *
 * With an argument it waits at each stop for a line on its standard input. */
#include "cuda.h"
#include "gpumem.h"

#define MIB ((uint64_t)1 << 20)
enum { SEGMENTS = 2 };
static const uint64_t SEGMENT = 32 * ((uint64_t)1 << 20);

struct segment {
    uint64_t address, handle;
};

static void map(struct segment *segment) {
    cuda_memory memory;
    cuda_access access;
    memset(&memory, 0, sizeof memory);
    memset(&access, 0, sizeof access);
    memory.type = 1;          /* pinned */
    memory.location.type = 1; /* on device 0 */
    access.location.type = 1;
    access.flags = 3; /* read and write */
    MUST(cu.cuMemCreate(&segment->handle, SEGMENT, &memory, 0));
    MUST(cu.cuMemMap(segment->address, SEGMENT, 0, segment->handle, 0));
    MUST(cu.cuMemSetAccess(segment->address, SEGMENT, &access, 1));
}

static void unmap(struct segment *segment) {
    MUST(cu.cuMemUnmap(segment->address, SEGMENT));
    MUST(cu.cuMemRelease(segment->handle));
}

static void stop_at(const char *where, int waits) {
    char line[16];
    printf("%s\n", where);
    fflush(stdout);
    if (waits && fgets(line, sizeof line, stdin) == NULL) exit(0);
}

int main(int argc, char **argv) {
    struct segment segments[SEGMENTS];
    uint64_t pool, cache, opaque, gauge, weights, slab, page, direct;
    int index, waits = argc > 1;
    (void)argv;
    cuda_begin();

    /* The pool and where it carves from. */
    pool = gpumem_pool_create("server", 0, 0);
    for (index = 0; index < SEGMENTS; index++) {
        MUST(cu.cuMemAddressReserve(&segments[index].address, SEGMENT, 0, 0, 0));
        gpumem_push("server/memory");
        map(&segments[index]);
        gpumem_pop();
        gpumem_segment_add(pool, segments[index].address, SEGMENT);
    }
    /* Blocks, each with the tag in force. */
    weights = segments[0].address;
    gpumem_push("weights");
    gpumem_block_alloc(pool, weights, 24 * MIB, 0);
    gpumem_retag(pool, weights, NULL, GPUMEM_ROLE_PARAMETER, 0);
    gpumem_pop();
    slab = segments[1].address;
    gpumem_push("kv-cache");
    gpumem_block_alloc(pool, slab, 16 * MIB, 1);
    gpumem_pop();
    /* A nested pool, which carves pages from that block. Its pages are counted in place of the block. */
    cache = gpumem_pool_create("pages", 0, pool);
    gpumem_segment_add(cache, slab, 16 * MIB);
    page = slab;
    gpumem_push("kv-cache/request.7");
    gpumem_block_alloc(cache, page, 2 * MIB, 1);
    gpumem_pop();
    /* The pools' own totals, which the daemon compares with the reported blocks. */
    gpumem_pool_state(pool, SEGMENTS * SEGMENT, 40 * MIB);
    gpumem_pool_check(pool, 40 * MIB);
    gpumem_pool_check(cache, 2 * MIB);

    /* A pool that reports no blocks: one allocation, and a gauge. */
    gpumem_push("scratch");
    direct = cuda_alloc(8 * MIB);
    gpumem_pop();
    opaque = gpumem_pool_create("scratch", 0, 0);
    gpumem_segment_add(opaque, direct, 8 * MIB);
    for (gauge = 1; gauge <= 3; gauge++) gpumem_pool_state(opaque, 8 * MIB, gauge * MIB);
    stop_at("awake", waits);

    /* Sleep: the cache is dropped. The weights are saved elsewhere and keep their addresses. The unmapping needs no report:
     * the agent sees the driver's calls. */
    gpumem_block_free(cache, page, 0);
    gpumem_segment_remove(cache, slab, 16 * MIB);
    gpumem_block_free(pool, slab, 0);
    for (index = 0; index < SEGMENTS; index++) unmap(&segments[index]);
    gpumem_pool_state(pool, 0, 0);
    stop_at("asleep", waits);

    for (index = 0; index < SEGMENTS; index++) map(&segments[index]);
    gpumem_pool_state(pool, SEGMENTS * SEGMENT, 24 * MIB);
    gpumem_pool_check(pool, 24 * MIB);
    stop_at("woken", waits);

    gpumem_pool_destroy(opaque);
    MUST(cu.cuMemFree_v2(direct));
    gpumem_pool_destroy(cache);
    gpumem_pool_destroy(pool);
    for (index = 0; index < SEGMENTS; index++) {
        unmap(&segments[index]);
        MUST(cu.cuMemAddressFree(segments[index].address, SEGMENT));
    }
    stop_at("gone", waits);
    return 0;
}
