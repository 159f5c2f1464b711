/* gpumem.h: names for GPU memory, from C and C++ (C99, C++98 and later).
 *
 * Header-only: nothing to link but the C library (and -ldl before glibc 2.34). The functions find libgpumem.so in
 * the process, where the driver has loaded it (CUDA_INJECTION64_PATH, as set by `gpumemctl run`), and do nothing
 * without it. Calls cost a load and a branch then; scopes cost about 10 ns with it.
 *
 * Strings are UTF-8 ending with 0 and are copied; NULL counts as empty. Amounts are bytes, addresses are device
 * addresses as numbers. Every function may be called from any thread, at any time, also in a forked child, where all
 * of them do nothing.
 *
 *     gpumem_push("model");
 *       gpumem_push("layer.0");         allocations of this thread are model/layer.0
 *         cudaMalloc(...);
 *       gpumem_pop();
 *     gpumem_pop();
 */
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
    GPUMEM_ROLE_BUFFER = 8
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

/* Step `number` of the training begins. */
static inline void gpumem_step(uint64_t number) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->step(number);
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

/* It gave that range back: one segment, several, or a part of one. */
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

/* What is now known of a block, or with pool 0 of a driver allocation: path (or NULL), an enum gpumem_role, an enum
 * gpumem_phase_kind; 0 for what is not known. */
static inline void gpumem_retag(uint64_t pool, uint64_t address, const char *path, int role, int phase) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->retag(pool, address, path, role, phase);
}

/* Lets another CUPTI client (a profiler) have the one subscription of the process: it is free when this returns. Driver calls
 * are not seen until gpumem_resume, and the report says so. May be called before CUDA is initialised; calls nest. */
static inline void gpumem_pause(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->pause();
}

/* Takes the subscription back, now or as soon as the other client lets go. What was freed meanwhile is not known: from here on
 * the sums are marked as partial. */
static inline void gpumem_resume(void) {
    const struct gpumem_functions *f = gpumem_functions();
    if (f != 0) f->resume();
}

#ifdef __cplusplus
}
#endif
#endif
