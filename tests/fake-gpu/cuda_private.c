/* The oracle's interface: the program reports its own memory for the truth journal. A real driver has no such
 * entry points; a program resolves them with dlsym. */
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

_Thread_local uint32_t thread_tag;

static uint64_t hash_of(const char *text) {
    uint64_t h = 1469598103934665603ull;
    for (; *text; text++) h = (h ^ (uint8_t)*text) * 1099511628211ull;
    return h;
}

/* Needs the lock. A full table counts further names under its last one. */
static uint32_t intern(const char *path) {
    static uint32_t index[SIM_TAGS * 2]; /* id + 1 by hash */
    if (!path || !*path) return 0;
    sim_tags *tags = &machine->tags[slot];
    sim_slot *mine = &machine->slot[slot];
    char name[SIM_TAG_BYTES];
    strncpy(name, path, sizeof name - 1);
    name[sizeof name - 1] = 0;
    size_t at = hash_of(name) % (SIM_TAGS * 2);
    for (; index[at]; at = (at + 1) % (SIM_TAGS * 2))
        if (!strcmp(tags->name[index[at]], name)) return index[at];
    if (mine->tag_count == SIM_TAGS) return SIM_TAGS - 1;
    if (mine->tag_count == SIM_TAGS - 1) strcpy(name, "(more tags than the machine keeps)");
    memcpy(tags->name[mine->tag_count], name, sizeof name);
    return index[at] = mine->tag_count++;
}

void tag_add(int device, uint32_t tag, int64_t bytes) { machine->tags[slot].bytes[device][tag] += bytes; }

/* ---- segments, in order of address, and the blocks in them ---- */

typedef struct {
    uint64_t address, bytes, blocks;
    int device;
} segment;
static segment *segments;
static size_t segment_count, segment_capacity;

typedef struct block {
    struct block *next;
    uint64_t address, bytes;
    uint32_t tag;
    int device;
} block;
static block **table, *spare;
static size_t buckets, blocks;

static size_t place(uint64_t address) { return (address * 0x9e3779b97f4a7c15ull >> 20) & (buckets - 1); }

static block **block_at(uint64_t address) {
    block **at = &table[place(address)];
    while (*at && (*at)->address != address) at = &(*at)->next;
    return at;
}

static void grow(void) {
    size_t old = buckets;
    block **from = table;
    buckets = old ? old * 2 : 1024;
    table = calloc(buckets, sizeof *table);
    if (!table) abort();
    for (size_t i = 0; i < old; i++)
        for (block *b = from[i], *next; b; b = next) {
            next = b->next;
            block **at = &table[place(b->address)];
            b->next = *at;
            *at = b;
        }
    free(from);
}

static size_t after(uint64_t address) {
    size_t low = 0, high = segment_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (segments[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static segment *segment_of(uint64_t address) {
    size_t at = after(address);
    if (!at || segments[at - 1].address + segments[at - 1].bytes <= address) return NULL;
    return &segments[at - 1];
}

static void drop(block **at) {
    block *b = *at;
    tag_add(b->device, b->tag, -(int64_t)b->bytes);
    usage(b->device)->idle_bytes += b->bytes;
    segment *s = segment_of(b->address);
    if (s) s->blocks--;
    *at = b->next;
    b->next = spare;
    spare = b;
    blocks--;
}

static void insert(uint64_t address, uint64_t bytes, int device) {
    if (segment_count == segment_capacity) {
        segment_capacity = segment_capacity ? segment_capacity * 2 : 64;
        segments = realloc(segments, segment_capacity * sizeof *segments);
        if (!segments) abort();
    }
    size_t at = after(address);
    memmove(segments + at + 1, segments + at, (segment_count - at) * sizeof *segments);
    segments[at] = (segment){address, bytes, 0, device};
    segment_count++;
}

void segments_cut(uint64_t address, uint64_t bytes) {
    uint64_t end = address + bytes;
    for (size_t i = 0; i < segment_count;) {
        segment s = segments[i];
        if (s.address + s.bytes <= address || end <= s.address) {
            i++;
            continue;
        }
        for (size_t k = 0; s.blocks && k < buckets; k++)
            for (block **at = &table[k]; *at;)
                if ((*at)->address >= address && (*at)->address < end)
                    drop(at);
                else
                    at = &(*at)->next;
        uint64_t left_blocks = segments[i].blocks;
        memmove(segments + i, segments + i + 1, (--segment_count - i) * sizeof *segments);
        if (s.address < address) insert(s.address, address - s.address, s.device);
        if (end < s.address + s.bytes) insert(end, s.address + s.bytes - end, s.device);
        /* Remaining blocks may be on either side. A count that is too large only costs a search. */
        if (left_blocks)
            for (size_t k = 0; k < segment_count; k++)
                if (segments[k].address == s.address || segments[k].address == end) segments[k].blocks = left_blocks;
        i = 0;
    }
}

/* ---- entry points ---- */

/* Sets the tag of this thread's further allocations. */
EXPORT void gpumemSimTag(const char *path) {
    if (ready() != OK) return;
    enter();
    thread_tag = intern(path);
    leave();
}

/* Declares the memory as a pool's: its bytes are idle until blocks cover them. */
EXPORT void gpumemSimSegment(uint64_t address, uint64_t bytes) {
    if (ready() != OK || !bytes) return;
    enter();
    int device = -1;
    row *r = row_find(address);
    if (r && r->kind <= POOLED && !r->segment) {
        r->segment = 1;
        tag_add(r->device, r->tag, -(int64_t)r->bytes);
        usage(r->device)->idle_bytes += r->bytes;
        device = r->device;
    } else if (!r) {
        device = vmm_segment(address, bytes);
    }
    if (device >= 0)
        insert(address, bytes, device);
    else
        machine->strays++;
    leave();
}

/* Reports a block in a segment with a tag (NULL: the thread's). 0 bytes: it is freed. Repeated: its tag changes. */
EXPORT void gpumemSimBlock(uint64_t address, uint64_t bytes, const char *tag) {
    if (ready() != OK) return;
    enter();
    if (blocks >= buckets) grow();
    block **at = block_at(address);
    if (*at) drop(at);
    segment *s = bytes ? segment_of(address) : NULL;
    if (s) {
        block *b = spare;
        if (b)
            spare = b->next;
        else if (!(b = malloc(sizeof *b)))
            abort();
        at = &table[place(address)];
        *b = (block){*at, address, bytes, tag ? intern(tag) : thread_tag, s->device};
        *at = b;
        blocks++;
        s->blocks++;
        tag_add(b->device, b->tag, (int64_t)bytes);
        usage(b->device)->idle_bytes -= bytes;
    } else if (bytes) {
        machine->strays++;
    }
    leave();
}

/* Changes the tag of a live allocation that is not pool memory. */
EXPORT void gpumemSimRetag(uint64_t address, const char *tag) {
    if (ready() != OK) return;
    enter();
    row *r = row_find(address);
    if (r && !r->segment && r->kind <= ARRAY) {
        uint32_t to = intern(tag);
        if (r->kind < MANAGED || r->kind == ARRAY) {
            tag_add(r->device, r->tag, -(int64_t)r->bytes);
            tag_add(r->device, to, (int64_t)r->bytes);
        }
        r->tag = to;
    }
    leave();
}

/* Between hold(1) and hold(0) every other process waits. So a report to the profiler and the same report to the oracle
 * are one change, and no list is taken between them. The caller must make no driver call in between. */
EXPORT void gpumemSimHold(int on) {
    if (ready() == OK) sim_freeze(machine, on);
}
