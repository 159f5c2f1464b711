/* Device addresses of this process: numbers without memory behind them. The lowest free range is always used, so the
 * next request reuses a freed address at once. All under the machine's lock. */
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

#define SPACE_BEGIN 0x200000000000ull
#define SPACE_END 0x600000000000ull
#define UNIT 512ull

/* Free extents in order of address. */
typedef struct {
    uint64_t begin, end;
} extent;
static extent *extents;
static size_t extent_count, extent_capacity;

static void *grown(void *array, size_t *capacity, size_t count, size_t size) {
    if (count < *capacity) return array;
    *capacity = *capacity ? *capacity * 2 : 64;
    array = realloc(array, *capacity * size);
    if (!array) abort();
    return array;
}

static void insert(size_t at, extent e) {
    extents = grown(extents, &extent_capacity, extent_count, sizeof *extents);
    memmove(extents + at + 1, extents + at, (extent_count - at) * sizeof *extents);
    extents[at] = e;
    extent_count++;
}

static void erase(size_t at) {
    memmove(extents + at, extents + at + 1, (--extent_count - at) * sizeof *extents);
}

static void begin(void) {
    static int done;
    if (!done && (done = 1)) insert(0, (extent){SPACE_BEGIN, SPACE_END});
}

static void cut(size_t at, uint64_t from, uint64_t to) {
    extent e = extents[at];
    if (e.begin == from && e.end == to) {
        erase(at);
    } else if (e.begin == from) {
        extents[at].begin = to;
    } else if (e.end == to) {
        extents[at].end = from;
    } else {
        extents[at].end = from;
        insert(at + 1, (extent){to, e.end});
    }
}

uint64_t space_take(uint64_t bytes, uint64_t alignment) {
    begin();
    for (size_t i = 0; i < extent_count; i++) {
        uint64_t from = sim_round(extents[i].begin, alignment);
        if (from + bytes > extents[i].end || from + bytes < from) continue;
        cut(i, from, from + bytes);
        return from;
    }
    return 0;
}

int space_take_at(uint64_t address, uint64_t bytes) {
    begin();
    for (size_t i = 0; i < extent_count; i++)
        if (extents[i].begin <= address && address + bytes <= extents[i].end) {
            cut(i, address, address + bytes);
            return 0;
        }
    return -1;
}

void space_give(uint64_t address, uint64_t bytes) {
    size_t low = 0, high = extent_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (extents[middle].begin < address)
            low = middle + 1;
        else
            high = middle;
    }
    int left = low > 0 && extents[low - 1].end == address;
    int right = low < extent_count && extents[low].begin == address + bytes;
    if (left && right) {
        extents[low - 1].end = extents[low].end;
        erase(low);
    } else if (left) {
        extents[low - 1].end += bytes;
    } else if (right) {
        extents[low].begin = address;
    } else {
        insert(low, (extent){address, address + bytes});
    }
}

/* ---- rows: address -> allocation ---- */

static row **table, *spare;
static size_t buckets, rows;

static size_t place(uint64_t address) { return (address * 0x9e3779b97f4a7c15ull >> 20) & (buckets - 1); }

static void grow(void) {
    size_t old = buckets;
    row **from = table;
    buckets = old ? old * 2 : 1024;
    table = calloc(buckets, sizeof *table);
    if (!table) abort();
    for (size_t i = 0; i < old; i++)
        for (row *r = from[i], *next; r; r = next) {
            next = r->next;
            row **at = &table[place(r->address)];
            r->next = *at;
            *at = r;
        }
    free(from);
}

row *row_add(uint64_t address) {
    if (rows >= buckets) grow();
    row *r = spare;
    if (r)
        spare = r->next;
    else if (!(r = malloc(sizeof *r)))
        abort();
    memset(r, 0, sizeof *r);
    r->address = address;
    row **at = &table[place(address)];
    r->next = *at;
    *at = r;
    rows++;
    return r;
}

row *row_find(uint64_t address) {
    if (!buckets) return NULL;
    row *r = table[place(address)];
    while (r && r->address != address) r = r->next;
    return r;
}

void row_drop(row *r) {
    row **at = &table[place(r->address)];
    while (*at != r) at = &(*at)->next;
    *at = r->next;
    r->next = spare;
    spare = r;
    rows--;
}

/* Iterates over all rows. The caller may drop a row only after it has requested the next one. */
row *row_each(row *after) {
    if (after && after->next) return after->next;
    for (size_t i = after ? place(after->address) + 1 : 0; i < buckets; i++)
        if (table[i]) return table[i];
    return NULL;
}

/* ---- chunks ---- */

chunk *chunk_new(uint64_t address, uint64_t bytes) {
    uint64_t units = bytes / UNIT, words = (units + 63) / 64;
    chunk *c = calloc(1, sizeof *c + words * sizeof(uint64_t));
    if (!c) abort();
    c->address = address;
    c->bytes = bytes;
    c->units = c->free_units = units;
    return c;
}

static void mark(chunk *c, uint64_t from, uint64_t count, int taken) {
    for (uint64_t u = from; u < from + count;) {
        if (u % 64 == 0 && u + 64 <= from + count) {
            c->map[u / 64] = taken ? ~0ull : 0;
            u += 64;
        } else {
            uint64_t bit = 1ull << u % 64;
            c->map[u / 64] = taken ? c->map[u / 64] | bit : c->map[u / 64] & ~bit;
            u++;
        }
    }
}

uint64_t chunk_take(chunk *c, uint64_t bytes) {
    uint64_t need = (bytes + UNIT - 1) / UNIT, run = 0;
    if (need > c->free_units) return 0;
    for (uint64_t u = 0; u < c->units;) {
        if (u % 64 == 0 && c->map[u / 64] == ~0ull) {
            run = 0;
            u += 64;
        } else if (u % 64 == 0 && c->map[u / 64] == 0 && u + 64 <= c->units && run + 64 < need) {
            run += 64;
            u += 64;
        } else {
            run = c->map[u / 64] >> u % 64 & 1 ? 0 : run + 1;
            u++;
            if (run == need) {
                mark(c, u - need, need, 1);
                c->free_units -= need;
                return c->address + (u - need) * UNIT;
            }
        }
    }
    return 0;
}

int chunk_give(chunk *c, uint64_t address, uint64_t bytes) {
    uint64_t count = (bytes + UNIT - 1) / UNIT;
    mark(c, (address - c->address) / UNIT, count, 0);
    c->free_units += count;
    return c->free_units == c->units;
}
