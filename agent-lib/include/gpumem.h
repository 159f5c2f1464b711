/* gpumem.h: names for GPU memory, from C and C++ (C99, C++98 and later).
 *
 * Header-only: nothing to link but the C library (and -ldl before glibc 2.34). The functions find libgpumem.so in
 * the process, where the driver has loaded it (CUDA_INJECTION64_PATH, as set by `gpumemctl run`). Without the library each
 * call does nothing and costs a load and a branch. With it, a scope costs about 10 ns.
 *
 * Strings are NUL-terminated UTF-8 and are copied; NULL counts as empty. Amounts are bytes, addresses are device
 * addresses as integers, times are CLOCK_MONOTONIC in nanoseconds. No call throws, aborts or sets errno; a call that can
 * fail returns its result.
 *
 * Every function may be called from any thread at any time, also before CUDA is initialised. In a forked child every
 * function does nothing until the child initialises CUDA itself. In a signal handler, call only functions that take no lock
 * ("Takes locks." marks the others), and only after one call outside of a handler has located the library. If the handler
 * interrupts one of these functions, the calls inside the handler do nothing.
 *
 *     gpumem_push("model");
 *       gpumem_push("layer.0");         allocations of this thread are model/layer.0
 *         cudaMalloc(...);
 *       gpumem_pop();
 *     gpumem_pop();
 *
 * Other calls report what the process holds (gpumem_dumps, gpumem_report, gpumem_memory_info) or write recordings
 * (gpumem_start, gpumem_stop, gpumem_dump). These wait for the agent's thread, for a few seconds at most. No other call
 * blocks. The equivalents of earlier profilers' calls are in docs/c-api.md. */
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

/* Purpose of a block, for gpumem_retag. */
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

/* Part of a training step, for gpumem_phase and gpumem_retag. */
enum gpumem_phase_kind {
    GPUMEM_PHASE_UNKNOWN = 0,
    GPUMEM_PHASE_SETUP = 1,
    GPUMEM_PHASE_FORWARD = 2,
    GPUMEM_PHASE_BACKWARD = 3,
    GPUMEM_PHASE_OPTIMIZER = 4,
    GPUMEM_PHASE_EVALUATION = 5
};

/* Internal: the library's functions, resolved once. */
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
    /* Added later: null if the loaded library is older. */
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
    int state;      /* 0 not found yet, 1 lookup in progress, 2 found */
    unsigned calls; /* calls made before it was found */
};

/* Internal: stores the address of the function `name` of `library` at `place`. Returns 1 if it exists. */
static inline int gpumem_find_one(void *library, const char *name, void *place) {
    void *found = dlsym(library, name);
    memcpy(place, &found, sizeof found); /* ISO C has no cast between the two kinds of pointers */
    return found != 0;
}

/* Internal: fills the table from the library in this process. Returns 1 if every required function exists. */
static inline int gpumem_find(struct gpumem_functions *f) {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    const char *file = path != 0 ? strrchr(path, '/') : 0;
    void *library = 0;
    int all = 1;
    file = file != 0 ? file + 1 : path;
    /* Loading the library early only makes scopes work before the first CUDA call. */
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

/* Internal: returns the functions, or null. Until they are found, the lookup is repeated at calls 1, 2, 4 ... 1024 and then
 * at every 1024th call. */
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

/* Returns 1 if the agent is loaded in this process and is recording, else 0. */
static inline int gpumem_available(void) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->available();
}

/* Opens the scope `name` inside the scopes already open on this thread: "a", then "b", gives the tag path a/b. `name` may
 * contain '/'. A path is cut at 255 bytes. Each push needs a pop. */
static inline void gpumem_push(const char *name) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->push(name);
}

/* Closes the innermost scope of this thread. */
static inline void gpumem_pop(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->pop();
}

/* Sets the tag path for threads without an open scope; reports mark it as inherited. NULL removes it. */
static inline void gpumem_process_tag(const char *path) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->process_tag(path);
}

/* Marks the start of training step `number`. At the first and last step of `record_steps` it waits until the state is
 * written, for at most one second. Takes locks. */
static inline void gpumem_step(uint64_t number) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->step(number);
}

/* Marks the start of epoch `number` (from 1), which restarts step numbers. Call it before the epoch's first step. */
static inline void gpumem_epoch(uint64_t number) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->epoch != 0) f->epoch(number);
}

/* Marks the start of a phase, an enum gpumem_phase_kind. */
static inline void gpumem_phase(int phase) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->phase(phase);
}

/* Marks this moment with a name, shown in reports and timelines. */
static inline void gpumem_mark(const char *name) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->mark(name);
}

/* Registers a pool that carves blocks out of driver allocations on device `cuda_ordinal`. `parent` is the pool whose blocks
 * it carves, or 0. Returns the pool's id, or 0 if nothing is recorded; every function ignores pool 0. */
static inline uint64_t gpumem_pool_create(const char *name, int cuda_ordinal, uint64_t parent) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 ? f->pool_create(name, cuda_ordinal, parent) : 0;
}

/* Removes the pool with its segments and blocks. */
static inline void gpumem_pool_destroy(uint64_t pool) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->pool_destroy(pool);
}

/* Reports that the pool obtained [address, address + bytes) to carve blocks from. */
static inline void gpumem_segment_add(uint64_t pool, uint64_t address, uint64_t bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->segment_add(pool, address, bytes);
}

/* Reports that the pool released [address, address + bytes): one segment, several, or part of one. */
static inline void gpumem_segment_remove(uint64_t pool, uint64_t address, uint64_t bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->segment_remove(pool, address, bytes);
}

/* Reports a block of `bytes` (after rounding) that the pool handed out. `stream` is any small number the caller chooses. */
static inline void gpumem_block_alloc(uint64_t pool, uint64_t address, uint64_t bytes, uint32_t stream) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->block_alloc(pool, address, bytes, stream);
}

/* Reports that the block was returned. With `pending` 1 a stream may still use it; a second call with 0 must follow. */
static inline void gpumem_block_free(uint64_t pool, uint64_t address, int pending) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->block_free(pool, address, pending);
}

/* Sets the bytes that the pool has reserved and handed out, for pools that do not report blocks. */
static inline void gpumem_pool_state(uint64_t pool, uint64_t reserved_bytes, uint64_t used_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->pool_state(pool, reserved_bytes, used_bytes);
}

/* Passes the pool's own total of live block bytes; the daemon compares it with the reported blocks. */
static inline void gpumem_pool_check(uint64_t pool, uint64_t total_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && pool != 0) f->pool_check(pool, total_bytes);
}

/* Sets the tag path (or NULL), role (enum gpumem_role) and phase (enum gpumem_phase_kind) of a block; 0 leaves a value
 * unchanged. With pool 0 it applies to the PyTorch block at the address, or else to the driver allocation there. */
static inline void gpumem_retag(uint64_t pool, uint64_t address, const char *path, int role, int phase) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->retag(pool, address, path, role, phase);
}

/* Releases the process's only CUPTI subscription, so that another client (a profiler) can take it. Driver calls are not
 * recorded until gpumem_resume, and the report shows the interval. Works before CUDA is initialised; calls nest. Takes
 * locks. */
static inline void gpumem_pause(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->pause();
}

/* Takes the subscription back, now or as soon as the other client releases it. Frees made in between were not recorded, so
 * sums are marked partial from here on. Takes locks. */
static inline void gpumem_resume(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->resume();
}

/* Sets `key` to `value`, both strings. Returns 1, or 0 for an unknown key or invalid value. Works before CUDA is initialised.
 *
 *     marks         on   record steps, phases, marks and counters
 *     ranges        off  also record begin and end of scopes, for their times in the report (about 100 ns more per scope)
 *     api           on   record driver calls beyond memory (modules, streams, graphs); without them fewer causes are known
 *     memory        on   off has the effect of gpumem_mute until it is on again
 *     record_file        where gpumem_start writes: a new file, or a folder
 *     record_steps       100:110 records only these steps
 *     record_for         seconds after which the recording stops
 *     record_max_size    maximum size of the recording in bytes
 *     dump_file          where periodic dumps are written
 *     dump_period   0    seconds between dumps, at least 0.1; 0 disables them
 *
 * Switches accept 1, true, on, yes and 0, false, off, no. In a file name, %h is the host, and %r is "r", the rank and "-" (empty
 * without a rank). %p is "p" and the pid, %n a number that makes the name unique. The default name is
 * gpumem-%h-%r%p-%n.gpumem in the current folder. Takes locks. */
static inline int gpumem_configure(const char *key, const char *value) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->configure != 0 && f->configure(key, value);
}

/* Starts a recording to a file, in addition to the records sent to the daemon. It contains the current state and every later
 * event, and can be read at any time (`gpumemctl report FILE`). Returns 1 if a recording is active, 0 if the file exists or
 * cannot be created. Takes locks. */
static inline int gpumem_start(void) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->start != 0 && f->start();
}

/* Stops the recording. Returns 1 if the file is complete up to this call, or if no recording was active. Takes locks. */
static inline int gpumem_stop(void) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->stop != 0 && f->stop();
}

/* Stops sending events while allocations are still tracked. gpumem_unmute sends the number of withheld events and the current
 * state: sums are exact again, peaks within the interval are unknown. Calls nest. Takes locks. */
static inline void gpumem_mute(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->mute != 0) f->mute();
}

/* Reverses one gpumem_mute. Takes locks. */
static inline void gpumem_unmute(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->unmute != 0) f->unmute();
}

/* Writes the current state to the new file `path` as a separate recording. With NULL or "" it flushes the active
 * recording, or writes a file with the default name if none is active. `finished` 1 also stops an active recording. Returns 1
 * on success. Takes locks. */
static inline int gpumem_dump(const char *path, int finished) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->dump != 0 && f->dump(path, finished);
}

/* Returns a report of this process as "text" or "json" (NULL: text); release it with gpumem_free. It is the daemon's report.
 * If no daemon answers, it is the agent's own, with live memory and counters but without NVML. `sort` (total, avg, min, max,
 * count, name; NULL: total) and `ascending` order the lines of the agent's report; `reset` 1 resets counter statistics.
 * Returns NULL for an unknown format or order, and without the agent. Takes locks. */
static inline char *gpumem_dumps(const char *format, const char *sort, int ascending, int reset) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->dumps != 0 ? f->dumps(format, sort, ascending, reset) : 0;
}

/* Returns the daemon's report of this process as "text", "json" or "csv" (NULL: text); release it with gpumem_free. Returns
 * NULL if no daemon answers within 3 s or it does not know this process. `options` (NULL for none) holds lines: "by=layer",
 * "by=structure" or "by=tag", and "all=1". Takes locks. */
static inline char *gpumem_report(const char *format, const char *options) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->report != 0 ? f->report(format, options) : 0;
}

/* Frees a string returned by gpumem_dumps or gpumem_report. Takes locks. */
static inline void gpumem_free(char *text) {
    free(text);
}

/* Sets counter `name`; `gpumemctl report --counters` shows its history. Takes locks. */
static inline void gpumem_counter_set(const char *name, int64_t value) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->counter_set != 0) f->counter_set(name, value);
}

/* Adds `change`, which may be negative, to counter `name`. A counter starts at 0. Takes locks. */
static inline void gpumem_counter_add(const char *name, int64_t change) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0 && f->counter_add != 0) f->counter_add(name, change);
}

/* Reads the device's free and total bytes from the driver; either pointer may be NULL. Returns 1, or 0 with nothing written
 * if neither the calling thread's current context nor the primary context is on that device. Takes locks. */
static inline int gpumem_memory_info(int cuda_ordinal, uint64_t *free_bytes, uint64_t *total_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->memory_info != 0 && f->memory_info(cuda_ordinal, free_bytes, total_bytes);
}

/* Argument of gpumem_peak. */
enum gpumem_peak_verb { GPUMEM_PEAK_END = 0, GPUMEM_PEAK_BEGIN = 1, GPUMEM_PEAK_RESET = 2 };

/* Begins, resets or ends (enum gpumem_peak_verb) a range whose peak is tracked; one range for each process. While a range is
 * open each allocation costs a few ns more. Returns 1, or 0 if memory for it is lacking. Takes locks. */
static inline int gpumem_peak(int verb) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->peak != 0 && f->peak(verb);
}

/* Reads the peak of the open range, exact to the byte: of live driver allocations on the device, and of live pool blocks
 * there; either pointer may be NULL. Returns 1, or 0 with nothing written if no range is open. */
static inline int gpumem_peak_bytes(int cuda_ordinal, uint64_t *bytes, uint64_t *block_bytes) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->peak_bytes != 0 && f->peak_bytes(cuda_ordinal, bytes, block_bytes);
}

/* Argument of gpumem_snapshot. */
enum gpumem_snapshot_kind { GPUMEM_SNAPSHOT_LIVE = 0, GPUMEM_SNAPSHOT_STATUS = 1, GPUMEM_SNAPSHOT_PEAK = 2 };

/* Writes JSON: live memory for each device, tag, role and pool; the agent's status; or the peak of the open range with its
 * composition. It is written to `buffer` without a terminating NUL if it fits into `capacity` bytes. Returns its length in
 * bytes, 0 without the agent. Takes locks. */
static inline uint64_t gpumem_snapshot(int kind, char *buffer, uint64_t capacity) {
    const struct gpumem_functions *f = gpumem_functions();
    return f != 0 && f->snapshot != 0 ? f->snapshot(kind, buffer, capacity) : 0;
}

#ifdef __cplusplus
}

namespace gpumem {
/* A scope that lasts as long as the object: gpumem::scope layer("layer.0"); */
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
