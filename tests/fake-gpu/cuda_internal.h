/* Internals of the simulated libcuda. Numbers and layouts are those of the driver API, but no header of CUDA is used.
 * */
#ifndef SIM_CUDA_INTERNAL_H
#define SIM_CUDA_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "hook.h"
#include "machine.h"

typedef uint32_t CUresult;
typedef uint64_t CUdeviceptr;
typedef int CUdevice;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    OS_CALL = 304,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};
enum { CONTEXT_CREATED = 1, CONTEXT_DESTROY, STREAM_CREATED, STREAM_DESTROY, INIT_FINISHED, MODULE_LOADED,
       MODULE_UNLOAD, GRAPHNODE_CREATED = 13, GRAPHEXEC_CREATED = 18, GRAPHEXEC_DESTROY };

/* Costs of this machine. A request below the limit shares a granule with others. */
#define SIM_GRANULE (machine->cost.granule)
#define SMALL_LIMIT (machine->cost.small_limit < SIM_GRANULE ? machine->cost.small_limit : SIM_GRANULE)
#define EXPORT __attribute__((visibility("default")))

extern sim_machine *machine;
extern int slot;

struct pool;
struct chunk;

typedef struct context {
    struct context *next;
    uint32_t uid, references; /* references: of a primary one */
    int device, primary, dead;
    uint64_t base; /* what it costs by itself; a green one shares the primary one's */
    uint64_t module_need;    /* asked for by its modules, before rounding */
    uint64_t module_charged; /* what they cost */
    uint64_t local, heaps;   /* what stacks, and printf FIFO and malloc heap, cost above their defaults */
    uint64_t stack_limit, heap_limit, fifo_limit;
    uint64_t internal_need, internal_charged; /* streams, events, executable graphs, peers */
    struct context *peer[SIM_DEVICES];
} context;

/* Streams and events: their cost in the context, and the graph that a stream is captured into. */
typedef struct {
    struct graph *into;
    context *owner;
    uint64_t cost;
    uint64_t id;   /* of the stream; of an event, that of the stream it was recorded in; 0: a default stream */
    uint64_t mark; /* of an event: when it was recorded while the device was busy */
} stream_state;

/* A device as this process sees it. */
typedef struct {
    int device;        /* of the machine */
    uint32_t instance; /* MIG instance or 0 */
    uint8_t uuid[16];
    context *primary;
    struct pool *default_pool, *current_pool, *graph_pool;
    uint64_t graph_used, graph_used_high;
} visible;

enum kind { DIRECT, SMALL, POOLED, MANAGED, HOST, REGISTERED, ARRAY, IPC, EXTERNAL, GRAPH };

/* One live address. */
typedef struct row {
    struct row *next; /* in its hash chain, or in the list of spare ones */
    uint64_t address, bytes, charged;
    context *owner;
    struct chunk *chunk;
    struct pool *pool;
    uint32_t tag;
    uint16_t device, kind, segment; /* segment: declared as pool memory; its bytes count as blocks or idle */
    uint16_t references;
} row;

typedef struct pool {
    struct pool *next;
    struct chunk *chunks;
    int ordinal, device, dying;
    uint64_t reserved, reserved_high, used, used_high, threshold, live;
    uint64_t flags[4];
} pool;

extern int visible_count;
extern visible seen[SIM_DEVICES * 8];
extern context *contexts;
extern _Thread_local uint32_t thread_tag;

/* cuda_core.c */
CUresult ready(void);     /* 0, or the error of every call: not initialised, forked, exiting */
void enter(void);         /* machine lock */
void leave(void);
void tell_resource(uint32_t cbid, void *context, void *stream, const void *descriptor);
typedef struct {
    sim_api_call call;
    uint64_t correlation;
    uint32_t result;
    const sim_hook *hook;
} api_frame;
void api_enter(api_frame *frame, uint32_t cbid, const char *name, const void *params);
CUresult api_exit(api_frame *frame, CUresult result);
void cost_before(uint64_t us);
void cost_after(uint64_t us);

/* Body of an entry point: the work between its callbacks; skipped in a process where calls fail (see ready). */
#define CALL_AS(cbid, name, params, work)                 \
    do {                                                  \
        api_frame frame_;                                 \
        api_enter(&frame_, (cbid), (name), (params));     \
        CUresult result_ = ready();                       \
        if (result_ == OK) result_ = (work);              \
        return api_exit(&frame_, result_);                \
    } while (0)
#define CALL(cbid, params, work) CALL_AS(cbid, __func__, params, work)
#define SILENT(work)                                      \
    do {                                                  \
        CUresult result_ = ready();                       \
        return result_ == OK ? (work) : result_;          \
    } while (0)

/* cuda_context.c; all under the lock unless noted */
context *current(void);
int current_ordinal(void); /* as CUDA counts, -1: no context */
visible *see(CUdevice ordinal);
int ordinal_of(const context *c);
sim_usage *usage(int device);
void free_owned(const context *owner);
/* Memory that the driver reserves internally in a context; the sum is rounded up to whole granules. `owner` may be null
 * or dead. */
CUresult internal_add(context *owner, int64_t change);
/* Grows the stacks to a kernel's need, as a launch does. Stacks never shrink. */
CUresult stack_grow(context *c, uint64_t bytes);

/* cuda_space.c: addresses and rows, under the lock */
uint64_t space_take(uint64_t bytes, uint64_t alignment); /* lowest free */
int space_take_at(uint64_t address, uint64_t bytes);
void space_give(uint64_t address, uint64_t bytes);
row *row_add(uint64_t address);
row *row_find(uint64_t address);
void row_drop(row *r);
row *row_each(row *after); /* NULL begins and ends */
uint64_t chunk_take(struct chunk *c, uint64_t bytes); /* 0: does not fit */
int chunk_give(struct chunk *c, uint64_t address, uint64_t bytes); /* 1: now empty */

/* A piece of device memory that smaller requests are cut from, in units of 512 bytes. */
typedef struct chunk {
    struct chunk *next;
    context *owner;
    int device;
    uint64_t address, bytes, units, free_units;
    uint64_t map[]; /* a bit per unit: taken */
} chunk;
chunk *chunk_new(uint64_t address, uint64_t bytes);

/* cuda_memory.c, under the lock */
CUresult take_direct(context *owner, uint64_t bytes, int kind, uint64_t *address);
CUresult free_row(row *r);
void small_forget(const context *owner);

/* cuda_pool.c, under the lock */
CUresult pool_take(pool *p, uint64_t bytes, int kind, uint64_t *address);
void pool_give(row *r);
void pool_trim(pool *p, uint64_t keep);
void pools_synchronize(void);
pool *pool_make(int ordinal, int device);
void pools_forget(int device);
void pool_destroy(pool *p);

/* cuda_stream.c, under the lock: all work that was begun is done */
void streams_settle(void);

/* cuda_graph.c: allocations of a captured stream become nodes of a graph, without memory until a launch */
int capturing(const void *stream);
CUresult capture_alloc(void *stream, int ordinal, uint64_t bytes, uint64_t *address);
CUresult capture_free(void *stream, uint64_t address);

/* cuda_vmm.c */
void vmm_forget(int device);
void vmm_settle(void);
void import_add(sim_usage *u, int64_t bytes); /* cuda_share.c; under the lock */
int vmm_segment(uint64_t address, uint64_t bytes);
int vmm_find(uint64_t address, uint64_t *begin, uint64_t *bytes); /* device of what is mapped there, or -1 */

/* cuda_private.c, under the lock */
void tag_add(int device, uint32_t tag, int64_t bytes);
void segments_cut(uint64_t address, uint64_t bytes); /* memory is gone: its blocks and segments too */

#endif
