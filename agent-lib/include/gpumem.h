/* gpumem.h: names for GPU memory, from C and C++ (C99, C++98 and later).
 *
 * Header-only: nothing to link but the C library (and -ldl before glibc 2.34). The functions find libgpumem.so in
 * the process, where the driver has loaded it (CUDA_INJECTION64_PATH, as set by `gpumemctl run`), and do nothing
 * without it. Calls cost a load and a branch then; scopes cost about 10 ns with it.
 *
 * Strings are UTF-8 ending with 0 and are copied; NULL counts as empty. Amounts are bytes, addresses are device
 * addresses as numbers, times nanoseconds of CLOCK_MONOTONIC. What a call cannot do it leaves: none raises, aborts, or says
 * anything by errno; those that can fail say so by their result.
 *
 * Every function may be called from any thread, at any time, before CUDA is initialised too. In a forked child all of them do
 * nothing until it initialises CUDA itself. In a signal handler those may be called that take no lock, which is said of the
 * others, once any call was made outside of one: before, the library is looked for. Where a handler interrupts one of these calls,
 * its own do nothing.
 *
 *     gpumem_push("model");
 *       gpumem_push("layer.0");         allocations of this thread are model/layer.0
 *         cudaMalloc(...);
 *       gpumem_pop();
 *     gpumem_pop();
 *
 * Beside the call that names something there are calls that say what the process holds (gpumem_dumps, gpumem_report,
 * gpumem_memory_info) and that write recordings (gpumem_start, gpumem_stop, gpumem_dump). Those wait for the agent's own thread,
 * for seconds at most; no other call waits for anything. docs/c-api.md has each call with its units and errors, and what the
 * calls of earlier profilers became. */
#ifndef GPUMEM_H
#define GPUMEM_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef RTLD_DEFAULT /* hidden by strict language modes */
#define GPUMEM_RTLD_DEFAULT ((void *)0)
#else
#define GPUMEM_RTLD_DEFAULT RTLD_DEFAULT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a block is for: gpumem_retag. */
enum gpumem_role {
    GPUMEM_ROLE_UNKNOWN = 0,
    GPUMEM_ROLE_PARAMETER = 1,
    GPUMEM_ROLE_GRADIENT = 2,
    GPUMEM_ROLE_OPTIMIZER_STATE = 3,
    GPUMEM_ROLE_ACTIVATION = 4,
    GPUMEM_ROLE_INPUT = 5,
    GPUMEM_ROLE_TEMPORARY = 6,
    GPUMEM_ROLE_WORKSPACE = 7,
    GPUMEM_ROLE_BUFFER = 8,
    GPUMEM_ROLE_KV_CACHE = 9,
    GPUMEM_ROLE_PARAMETER_COPY = 10
};

/* Part of a training step: gpumem_phase, gpumem_retag. */
enum gpumem_phase_kind {
    GPUMEM_PHASE_UNKNOWN = 0,
    GPUMEM_PHASE_SETUP = 1,
    GPUMEM_PHASE_FORWARD = 2,
    GPUMEM_PHASE_BACKWARD = 3,
    GPUMEM_PHASE_OPTIMIZER = 4,
    GPUMEM_PHASE_EVALUATION = 5
};

/* The library's functions, found once. Not for direct use. */
struct gpumem_functions {
    int (*available)(void);
    void (*push)(const char *);
    void (*pop)(void);
    void (*process_tag)(const char *);
    void (*step)(uint64_t);
    void (*phase)(int);
    void (*mark)(const char *);
    uint64_t (*pool_create)(const char *, int, uint64_t);
    void (*pool_destroy)(uint64_t);
    void (*segment_add)(uint64_t, uint64_t, uint64_t);
    void (*segment_remove)(uint64_t, uint64_t, uint64_t);
    void (*block_alloc)(uint64_t, uint64_t, uint64_t, uint32_t);
    void (*block_free)(uint64_t, uint64_t, int);
    void (*pool_state)(uint64_t, uint64_t, uint64_t);
    void (*pool_check)(uint64_t, uint64_t);
    void (*retag)(uint64_t, uint64_t, const char *, int, int);
    void (*pause)(void);
    void (*resume)(void);
    /* Newer ones: null in a library that has not got them. */
    int (*configure)(const char *, const char *);
    int (*start)(void);
    int (*stop)(void);
    void (*mute)(void);
    void (*unmute)(void);
    int (*dump)(const char *, int);
    char *(*dumps)(const char *, const char *, int, int);
    char *(*report)(const char *, const char *);
    void (*counter_set)(const char *, int64_t);
    void (*counter_add)(const char *, int64_t);
    int (*memory_info)(int, uint64_t *, uint64_t *);
    void (*epoch)(uint64_t);
    uint64_t (*snapshot)(int, char *, uint64_t);
    int (*peak)(int);
    int (*peak_bytes)(int, uint64_t *, uint64_t *);
    int state;      /* 0 not found so far, 1 being looked for, 2 found */
    unsigned calls; /* while not found */
};

/* Not for direct use: puts the function `name` of `library` at `place`. */
static inline int gpumem_find_one(void *library, const char *name, void *place) {
    void *found = dlsym(library, name);
    memcpy(place, &found, sizeof found); /* ISO C has no cast between the two kinds of pointers */
    return found != 0;
}

/* Not for direct use: fills the table from the library of this process. 1 if everything is there. */
static inline int gpumem_find(struct gpumem_functions *f) {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    const char *file = path != 0 ? strrchr(path, '/') : 0;
    void *library = 0;
    int all = 1;
    file = file != 0 ? file + 1 : path;
    /* Loading it early does nothing but make scopes work before the first CUDA call. */
    if (file != 0 && strncmp(file, "libgpumem", 9) == 0) library = dlopen(path, RTLD_NOW);
    if (library == 0) library = GPUMEM_RTLD_DEFAULT; /* preloaded, or linked */
#define GPUMEM_FIND(name) all = gpumem_find_one(library, "gpumem_" #name, &f->name) && all
    GPUMEM_FIND(available);
    if (!all) return 0;
    GPUMEM_FIND(push);
    GPUMEM_FIND(pop);
    GPUMEM_FIND(process_tag);
    GPUMEM_FIND(step);
    GPUMEM_FIND(phase);
    GPUMEM_FIND(mark);
    GPUMEM_FIND(pool_create);
    GPUMEM_FIND(pool_destroy);
    GPUMEM_FIND(segment_add);
    GPUMEM_FIND(segment_remove);
    GPUMEM_FIND(block_alloc);
    GPUMEM_FIND(block_free);
    GPUMEM_FIND(pool_state);
    GPUMEM_FIND(pool_check);
    GPUMEM_FIND(retag);
    GPUMEM_FIND(pause);
    GPUMEM_FIND(resume);
#undef GPUMEM_FIND
#define GPUMEM_FIND_NEWER(name) (void)gpumem_find_one(library, "gpumem_" #name, &f->name)
    GPUMEM_FIND_NEWER(configure);
    GPUMEM_FIND_NEWER(start);
    GPUMEM_FIND_NEWER(stop);
    GPUMEM_FIND_NEWER(mute);
    GPUMEM_FIND_NEWER(unmute);
    GPUMEM_FIND_NEWER(dump);
    GPUMEM_FIND_NEWER(dumps);
    GPUMEM_FIND_NEWER(report);
    GPUMEM_FIND_NEWER(counter_set);
    GPUMEM_FIND_NEWER(counter_add);
    GPUMEM_FIND_NEWER(memory_info);
    GPUMEM_FIND_NEWER(epoch);
    GPUMEM_FIND_NEWER(snapshot);
    GPUMEM_FIND_NEWER(peak);
    GPUMEM_FIND_NEWER(peak_bytes);
#undef GPUMEM_FIND_NEWER
    return all;
}

/* Not for direct use: the functions, or null. While they are not there, looks get rarer: at call 1, 2, 4 ... 1024 and then
 * each 1024th. */
static inline const struct gpumem_functions *gpumem_functions(void) {
    static struct gpumem_functions functions;
    int idle = 0;
    unsigned calls;
    if (__atomic_load_n(&functions.state, __ATOMIC_ACQUIRE) == 2) return &functions;
    calls = __atomic_add_fetch(&functions.calls, 1, __ATOMIC_RELAXED);
    if (calls > 1024 ? (calls & 1023) != 0 : (calls & (calls - 1)) != 0) return 0;
    if (!__atomic_compare_exchange_n(&functions.state, &idle, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return 0;
    idle = gpumem_find(&functions) ? 2 : 0;
    __atomic_store_n(&functions.state, idle, __ATOMIC_RELEASE);
    return idle == 2 ? &functions : 0;
}

/* 1 if the agent is in this process and records, else 0. */
static inline int gpumem_available(void) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->available();
}

/* Opens the scope `name` inside of those that are open on this thread: "a", then "b", gives the tag path a/b. `name` may hold
 * '/' itself. A path has at most 255 bytes; what is longer is cut. Each push needs its pop. */
static inline void gpumem_push(const char *name) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->push(name);
}

/* Closes the innermost scope of this thread. */
static inline void gpumem_pop(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->pop();
}

/* The tag path of threads that have no scope open; it is marked as inherited. NULL: none. */
static inline void gpumem_process_tag(const char *path) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->process_tag(path);
}

/* Step `number` of the training begins. At the first and last step of `record_steps` it waits until the state is written, a
 * second at most. Takes locks: not in a signal handler. */
static inline void gpumem_step(uint64_t number) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->step(number);
}

/* Epoch `number`, from 1 on, begins, in which steps are numbered anew: before its first step. */
static inline void gpumem_epoch(uint64_t number) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->epoch != 0) f->epoch(number);
}

/* The process enters a phase, an enum gpumem_phase_kind. */
static inline void gpumem_phase(int phase) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->phase(phase);
}

/* Something worth a mark in time happened. */
static inline void gpumem_mark(const char *name) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->mark(name);
}

/* A new pool that carves blocks out of driver allocations on the device `cuda_ordinal`; `parent` is the pool whose blocks it
 * carves, or 0. The pool's id; 0 if nothing is recorded, and every function takes that for nothing. */
static inline uint64_t gpumem_pool_create(const char *name, int cuda_ordinal, uint64_t parent) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 ? f->pool_create(name, cuda_ordinal, parent) : 0;
}

/* The pool is gone, with its segments and blocks. */
static inline void gpumem_pool_destroy(uint64_t pool) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->pool_destroy(pool);
}

/* The pool took [address, address + bytes) to carve blocks from. */
static inline void gpumem_segment_add(uint64_t pool, uint64_t address, uint64_t bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->segment_add(pool, address, bytes);
}

/* The pool gave [address, address + bytes) back: one segment, several, or a part of one. */
static inline void gpumem_segment_remove(uint64_t pool, uint64_t address, uint64_t bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->segment_remove(pool, address, bytes);
}

/* The pool handed out a block of `bytes` (after its rounding) on a stream, any small number of the caller's. */
static inline void gpumem_block_alloc(uint64_t pool, uint64_t address, uint64_t bytes, uint32_t stream) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->block_alloc(pool, address, bytes, stream);
}

/* The block came back; `pending` 1: a stream may still use it, and a second call with 0 follows. */
static inline void gpumem_block_free(uint64_t pool, uint64_t address, int pending) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->block_free(pool, address, pending);
}

/* What the pool says that it has reserved and handed out, in bytes; for pools that report no blocks. */
static inline void gpumem_pool_state(uint64_t pool, uint64_t reserved_bytes, uint64_t used_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->pool_state(pool, reserved_bytes, used_bytes);
}

/* The pool's own total of live block bytes, to be compared with what was reported. */
static inline void gpumem_pool_check(uint64_t pool, uint64_t total_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->pool_check(pool, total_bytes);
}

/* What is now known of a block, or with pool 0 of what lies at the address, a block of PyTorch's or else a driver
 * allocation: path (or NULL), an enum gpumem_role, an enum gpumem_phase_kind; 0 for what is not known. */
static inline void gpumem_retag(uint64_t pool, uint64_t address, const char *path, int role, int phase) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->retag(pool, address, path, role, phase);
}

/* Lets another CUPTI client (a profiler) have the one subscription of the process: it is free when this returns. Driver calls
 * are not seen until gpumem_resume, and the report says so. May be called before CUDA is initialised; calls nest. Takes locks:
 * not in a signal handler. */
static inline void gpumem_pause(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->pause();
}

/* Takes the subscription back, now or as soon as the other client lets go. What was freed meanwhile is not known: from here on
 * the sums are marked as partial. Takes locks: not in a signal handler. */
static inline void gpumem_resume(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->resume();
}

/* Sets `key` to `value`, both texts; 1, or 0 for a key or a value that is none. May be called before CUDA is initialised.
 *
 *     marks         on   steps, phases, marks and counters become records
 *     ranges        off  begin and end of scopes, too: the report has their times (a scope costs about 100 ns more then)
 *     api           on   what the driver does beyond memory: modules, streams, graphs. Without them the report knows fewer causes
 *     memory        on   off: as gpumem_mute until it is on again
 *     record_file        where gpumem_start writes: a new file, or a folder
 *     record_steps       100:110, the recording has only these steps
 *     record_for         seconds after which it ends by itself
 *     record_max_size    bytes that it may have
 *     dump_file          where dumps by themselves go
 *     dump_period   0    seconds between them, at least 0.1; 0: none
 *
 * Switches are 1, true, on, yes and 0, false, off, no. In a file's name, %h is the host, %r is r, the rank and - (nothing
 * without a rank), %p is p and the pid, %n a number that makes the name new; the usual name is gpumem-%h-%r%p-%n.gpumem in the
 * current folder. Takes locks: not in a signal handler. */
static inline int gpumem_configure(const char *key, const char *value) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->configure != 0 && f->configure(key, value);
}

/* Begins a recording beside what is told to the daemon; it holds the state and all that happens from here on, and can be read at
 * any time (`gpumemctl report FILE`). 1 if one goes on now, 0 if the file is there already or cannot be made. Takes locks: not
 * in a signal handler. */
static inline int gpumem_start(void) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->start != 0 && f->start();
}

/* Ends the recording. 1 if everything up to here is in it, or if none went on. Takes locks: not in a signal handler. */
static inline int gpumem_stop(void) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->stop != 0 && f->stop();
}

/* Keeps the history back: allocations go on to be watched and booked, but are told to nobody until gpumem_unmute, which tells
 * how many were not, and the state as it is then: sums are exact again, peaks of the time between are not known. Calls nest.
 * Takes locks: not in a signal handler. */
static inline void gpumem_mute(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->mute != 0) f->mute();
}

/* Ends one gpumem_mute. Takes locks: not in a signal handler. */
static inline void gpumem_unmute(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->unmute != 0) f->unmute();
}

/* Writes what is held now to the new file `path`, a recording of its own. NULL or "": if a recording goes on, everything up to
 * here is in it when this returns; else to a file of the usual name. `finished` 1 ends a recording that goes on. 1 if it is
 * written. Takes locks: not in a signal handler. */
static inline int gpumem_dump(const char *path, int finished) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->dump != 0 && f->dump(path, finished);
}

/* A report of this process as "text" or "json" (NULL: text), to be given to gpumem_free: the daemon's, or where none answers the
 * agent's own, which knows what is live and what counters have been, and nothing of NVML. `sort` (total, avg, min, max, count,
 * name; NULL: total) and `ascending` order the lines of the latter; `reset` 1 begins the statistics of counters anew. NULL for a
 * format or order that is none, and without the agent. Takes locks: not in a signal handler. */
static inline char *gpumem_dumps(const char *format, const char *sort, int ascending, int reset) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->dumps != 0 ? f->dumps(format, sort, ascending, reset) : 0;
}

/* The daemon's report of this process as "text", "json" or "csv" (NULL: text), to be given to gpumem_free; NULL where no daemon
 * answers within 3 s or it knows nothing of this process. `options`, NULL for none: lines "by=layer", "by=structure" or
 * "by=tag", and "all=1". Takes locks: not in a signal handler. */
static inline char *gpumem_report(const char *format, const char *options) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->report != 0 ? f->report(format, options) : 0;
}

/* Frees what gpumem_dumps and gpumem_report returned. Takes locks: not in a signal handler. */
static inline void gpumem_free(char *text) {
    free(text);
}

/* Counter `name` has this value from now on; `gpumemctl report --counters` tells what it has been. Takes locks: not in a signal handler. */
static inline void gpumem_counter_set(const char *name, int64_t value) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->counter_set != 0) f->counter_set(name, value);
}

/* Counter `name` has `change` more, or less. A counter begins at 0. Takes locks: not in a signal handler. */
static inline void gpumem_counter_add(const char *name, int64_t change) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->counter_add != 0) f->counter_add(name, change);
}

/* Bytes of the device that are free now for everybody, and its size, as the driver says; either place may be NULL. 1, or 0 and
 * nothing written if neither the current context of the calling thread nor the primary one is on that device. Takes locks: not
 * in a signal handler. */
static inline int gpumem_memory_info(int cuda_ordinal, uint64_t *free_bytes, uint64_t *total_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->memory_info != 0 && f->memory_info(cuda_ordinal, free_bytes, total_bytes);
}

/* What gpumem_peak does. */
enum gpumem_peak_verb { GPUMEM_PEAK_END = 0, GPUMEM_PEAK_BEGIN = 1, GPUMEM_PEAK_RESET = 2 };

/* Begins, begins anew or ends (an enum gpumem_peak_verb) a range whose highest is kept, of the process: one at a time. While one
 * is open each allocation costs a few ns more. 1, or 0 if there is no memory for it. Takes locks: not in a signal handler. */
static inline int gpumem_peak(int verb) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->peak != 0 && f->peak(verb);
}

/* The highest so far in the range that is open, exact to the byte: of live driver allocations on the device, and of live blocks
 * of pools there; either place may be NULL. 1, or 0 and nothing written while no range is open. */
static inline int gpumem_peak_bytes(int cuda_ordinal, uint64_t *bytes, uint64_t *block_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->peak_bytes != 0 && f->peak_bytes(cuda_ordinal, bytes, block_bytes);
}

/* What gpumem_snapshot tells. */
enum gpumem_snapshot_kind { GPUMEM_SNAPSHOT_LIVE = 0, GPUMEM_SNAPSHOT_STATUS = 1, GPUMEM_SNAPSHOT_PEAK = 2 };

/* As JSON: what is live, per device, tag, role and pool; how the agent is; or the high of the range that is open, and what it
 * was made of. Written to `buffer` without an end if it fits into `capacity` bytes; its length, 0 without the agent. Takes
 * locks: not in a signal handler. */
static inline uint64_t gpumem_snapshot(int kind, char *buffer, uint64_t capacity) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->snapshot != 0 ? f->snapshot(kind, buffer, capacity) : 0;
}

#ifdef __cplusplus
}

namespace gpumem {
/* A scope for as long as it lives: gpumem::scope here("layer.0"); */
class scope {
  public:
    explicit scope(const char *name) { gpumem_push(name); }
    ~scope() { gpumem_pop(); }

  private:
    scope(const scope &);
    scope &operator=(const scope &);
};
}
#endif
#endif
