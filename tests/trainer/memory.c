#include "memory.h"

#include <string.h>

#include "driver.h"
#include "tags.h"

#define SEGMENT_BYTES (64 * MIB)

_Atomic uint64_t longest_call_ns, calls;

static uint64_t clocked(uint64_t from) {
    uint64_t took = now_ns() - from, longest = longest_call_ns;
    calls++;
    while (took > longest && !__atomic_compare_exchange_n((uint64_t *)&longest_call_ns, &longest, took, 0,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return took;
}

uint64_t tracked(const device *d) { return d->direct + d->vmm + d->driver_pool; }

static void changed(device *d, uint64_t *sum, int64_t bytes) {
    pthread_mutex_lock(&d->lock);
    *sum += (uint64_t)bytes;
    if (tracked(d) > d->peak) d->peak = tracked(d);
    pthread_mutex_unlock(&d->lock);
}

int take(device *d, uint64_t bytes, uint64_t *address) {
    uint64_t begin = now_ns();
    int result = cu.cuMemAlloc_v2(address, bytes);
    clocked(begin);
    if (!result) changed(d, &d->direct, (int64_t)bytes);
    return result;
}

void give(device *d, uint64_t address, uint64_t bytes) {
    uint64_t begin = now_ns();
    must(cu.cuMemFree_v2(address), "cuMemFree");
    clocked(begin);
    changed(d, &d->direct, -(int64_t)bytes);
}

/* ---- the driver's pool: it counts with its reserved bytes ---- */

void look(device *d) {
    uint64_t reserved = 0;
    must(cu.cuMemPoolGetAttribute(d->default_pool, 5, &reserved), "cuMemPoolGetAttribute");
    changed(d, &d->driver_pool, (int64_t)(reserved - d->driver_pool));
}
int take_async(device *d, uint64_t bytes, uint64_t *address) {
    uint64_t begin = now_ns();
    int result = cu.cuMemAllocAsync(address, bytes, d->stream);
    clocked(begin);
    if (!result) look(d);
    return result;
}
void give_async(device *d, uint64_t address) {
    uint64_t begin = now_ns();
    must(cu.cuMemFreeAsync(address, d->stream), "cuMemFreeAsync");
    clocked(begin);
    look(d);
}

/* ---- the framework's pool ---- */

static int cut(caching *p, uint64_t bytes, uint64_t *address) {
    for (int s = 0; s < p->segments; s++) {
        uint64_t at = p->segment[s].address, end = at + p->segment[s].bytes;
        int b = 0;
        while (b < p->blocks && p->block[b].address < at) b++;
        for (; b <= p->blocks; b++) {
            uint64_t gap_end = b < p->blocks && p->block[b].address < end ? p->block[b].address : end;
            if (gap_end - at >= bytes) {
                memmove(&p->block[b + 1], &p->block[b], (size_t)(p->blocks++ - b) * sizeof(span));
                p->block[b] = (span){at, bytes};
                *address = at;
                return 1;
            }
            if (gap_end == end) break;
            at = p->block[b].address + p->block[b].bytes;
        }
    }
    return 0;
}

int block_take(device *d, uint64_t bytes, uint64_t *address) {
    caching *p = &d->pool;
    bytes = (bytes + 511) / 512 * 512;
    if (p->blocks == BLOCKS) return OUT_OF_MEMORY;
    if (!cut(p, bytes, address)) {
        uint64_t size = bytes > SEGMENT_BYTES ? (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB) : SEGMENT_BYTES, segment;
        if (p->segments == SEGMENTS) return OUT_OF_MEMORY;
        int result = take(d, size, &segment);
        if (result) return result;
        segment_new(p->id, segment, size);
        /* In order of address, as the blocks are. */
        int s = p->segments++;
        for (; s > 0 && p->segment[s - 1].address > segment; s--) p->segment[s] = p->segment[s - 1];
        p->segment[s] = (span){segment, size};
        p->reserved += size;
        cut(p, bytes, address);
    }
    p->used += bytes;
    block_new(p->id, *address, bytes);
    return 0;
}

void block_give(device *d, uint64_t address) {
    caching *p = &d->pool;
    for (int b = 0; b < p->blocks; b++)
        if (p->block[b].address == address) {
            p->used -= p->block[b].bytes;
            memmove(&p->block[b], &p->block[b + 1], (size_t)(--p->blocks - b) * sizeof(span));
            block_end(p->id, address);
            return;
        }
}

void pool_release(device *d) {
    caching *p = &d->pool;
    while (p->blocks) block_give(d, p->block[p->blocks - 1].address);
    while (p->segments) {
        span s = p->segment[--p->segments];
        segment_end(p->id, s.address, s.bytes);
        give(d, s.address, s.bytes);
    }
    pool_end(p->id);
}

/* ---- a region that grows: addresses once, memory piece by piece ---- */

int region_grow(device *d, uint64_t bytes) {
    if (!d->region) {
        d->region_bytes = 1ull << 30;
        must(cu.cuMemAddressReserve(&d->region, d->region_bytes, 0, 0, 0), "cuMemAddressReserve");
    }
    if (d->region_grown + bytes > d->region_bytes) return OUT_OF_MEMORY;
    vmm_prop prop = {.type = 1, .location = {1, d->ordinal}};
    vmm_access access = {{1, d->ordinal}, 3};
    uint64_t handle, begin = now_ns();
    int result = cu.cuMemCreate(&handle, bytes, &prop, 0);
    clocked(begin);
    if (result) return result;
    changed(d, &d->vmm, (int64_t)bytes);
    must(cu.cuMemMap(d->region + d->region_grown, bytes, 0, handle, 0), "cuMemMap");
    must(cu.cuMemSetAccess(d->region + d->region_grown, bytes, &access, 1), "cuMemSetAccess");
    must(cu.cuMemRelease(handle), "cuMemRelease"); /* the mapping keeps it */
    d->region_grown += bytes;
    return 0;
}

void region_release(device *d) {
    if (!d->region) return;
    if (d->region_grown) must(cu.cuMemUnmap(d->region, d->region_grown), "cuMemUnmap");
    must(cu.cuMemAddressFree(d->region, d->region_bytes), "cuMemAddressFree");
    changed(d, &d->vmm, -(int64_t)d->region_grown);
    d->region = d->region_grown = 0;
}
