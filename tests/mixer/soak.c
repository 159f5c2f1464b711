#include "soak.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "names.h"

#define PLACES 2048
#define THREADS 16
#define WARM (128ull << 20) /* bytes that pools keep: more than they ever have in use */

ground grounds[DEVICES];

static _Atomic(object *) places[PLACES];
static worker workers[THREADS + 1];
static int worker_count, ground_count;
static pthread_barrier_t begin, end;
static atomic_int over;

static void must(int result, const char *what) {
    if (!result) return;
    fprintf(stderr, "mixer: %s: %d\n", what, result);
    exit(4);
}

/* ---- what the rest stands on: contexts and pools ---- */

static void *pool_new(int ordinal) {
    void *pool = NULL;
    uint64_t all = UINT64_MAX;
    pool_shape shape = {.type = 1, .where = {1, ordinal}};
    must(cu.cuMemPoolCreate(&pool, &shape), "cuMemPoolCreate");
    must(cu.cuMemPoolSetAttribute(pool, 4, &all), "cuMemPoolSetAttribute");
    return pool;
}

static void touch(void *pool, uint64_t bytes) {
    uint64_t address;
    if (!cu.cuMemAllocFromPoolAsync(&address, bytes, pool, NULL)) must(cu.cuMemFreeAsync(address, NULL), "cuMemFreeAsync");
}

static void graph_warm(int ordinal) {
    void *graph, *made, *node;
    memory_node shape = {.pool = {.type = 1, .where = {1, ordinal}}, .bytes = WARM};
    must(cu.cuGraphCreate(&graph, 0), "cuGraphCreate");
    must(cu.cuGraphAddMemAllocNode(&node, graph, NULL, 0, &shape), "cuGraphAddMemAllocNode");
    must(cu.cuGraphInstantiateWithFlags(&made, graph, 0), "cuGraphInstantiate");
    must(cu.cuGraphLaunch(made, NULL), "cuGraphLaunch");
    must(cu.cuGraphExecDestroy(made), "cuGraphExecDestroy");
    must(cu.cuGraphDestroy(graph), "cuGraphDestroy");
}

void ground_begin(worker *w, int ordinal) {
    ground *g = &grounds[ordinal];
    uint64_t all = UINT64_MAX;
    (void)w;
    must(cu.cuDevicePrimaryCtxRetain(&g->context, ordinal), "cuDevicePrimaryCtxRetain");
    must(cu.cuCtxSetCurrent(g->context), "cuCtxSetCurrent");
    must(cu.cuDeviceGetDefaultMemPool(&g->default_pool, ordinal), "cuDeviceGetDefaultMemPool");
    must(cu.cuMemPoolSetAttribute(g->default_pool, 4, &all), "cuMemPoolSetAttribute");
    g->own_pool = pool_new(ordinal);
    if (!g->caching) g->caching = caching_new("caching", ordinal);
    touch(g->default_pool, WARM);
    touch(g->own_pool, WARM);
    graph_warm(ordinal);
}

/* Live allocations keep the old pool alive. */
void ground_shake(worker *w, int ordinal) {
    ground *g = &grounds[ordinal];
    must(cu.cuCtxSetCurrent(g->context), "cuCtxSetCurrent");
    must(cu.cuMemPoolTrimTo(g->default_pool, 0), "cuMemPoolTrimTo");
    touch(g->default_pool, WARM);
    if (roll(w, 2)) {
        must(cu.cuMemPoolDestroy(g->own_pool), "cuMemPoolDestroy");
        g->own_pool = pool_new(ordinal);
    }
    touch(g->own_pool, WARM);
    must(cu.cuDeviceGraphMemTrim(ordinal), "cuDeviceGraphMemTrim");
    graph_warm(ordinal);
}

/* A pool's reserved bytes are queried at calls on it, at most every 100 ms; those of graphs at calls that make graphs. */
void ground_settle(worker *w, int ordinal) {
    const ground *g = &grounds[ordinal];
    void *graph, *made;
    (void)w;
    must(cu.cuCtxSetCurrent(g->context), "cuCtxSetCurrent");
    must(cu.cuGraphCreate(&graph, 0), "cuGraphCreate");
    must(cu.cuGraphInstantiateWithFlags(&made, graph, 0), "cuGraphInstantiate");
    must(cu.cuGraphExecDestroy(made), "cuGraphExecDestroy");
    must(cu.cuGraphDestroy(graph), "cuGraphDestroy");
    touch(g->default_pool, 512);
    touch(g->own_pool, 512);
}

void ground_lost(worker *w, int ordinal) {
    (void)w;
    must(cu.cuMemPoolDestroy(grounds[ordinal].own_pool), "cuMemPoolDestroy");
}

/* ---- rounds ---- */

static void rename_me(worker *w) {
    char path[64];
    snprintf(path, sizeof path, "soak/layer.%u/part.%u", (unsigned)roll(w, 8), (unsigned)roll(w, 8));
    name_is(roll(w, 16) ? path : "");
}

static void act(worker *w) {
    int ordinal = (int)roll(w, (uint64_t)ground_count);
    _Atomic(object *) *place = &places[roll(w, PLACES)];
    object *o = atomic_exchange(place, NULL);
    if (o) ordinal = object_device(o);
    cu.cuCtxSetCurrent(grounds[ordinal].context);
    if (!roll(w, 8)) rename_me(w);
    if (!roll(w, 64)) misuse(w, ordinal);
    if (!roll(w, 16384)) pass_by(w, ordinal);
    if (o) {
        object_end(w, o);
        return;
    }
    o = object_new(w, ordinal);
    object *none = NULL;
    if (o && !atomic_compare_exchange_strong(place, &none, o)) object_end(w, o);
}

static void *work(void *mine) {
    worker *w = mine;
    for (;;) {
        pthread_barrier_wait(&begin);
        if (over) return NULL;
        while (w->calls < w->owed) act(w);
        pthread_barrier_wait(&end);
    }
}

static void reset(worker *w, int ordinal) {
    ground_lost(w, ordinal);
    must(cu.cuDevicePrimaryCtxReset_v2(ordinal), "cuDevicePrimaryCtxReset");
    for (int i = 0; i < PLACES; i++) {
        object *o = places[i];
        if (!o || object_device(o) != ordinal) continue;
        object_lost(o);
        places[i] = NULL;
    }
    ground_begin(w, ordinal);
}

/* Prints its progress (and the interval in which it was alone with the pools), and continues on command. */
static int show(const char *what, int round, uint64_t since) {
    char line[64];
    uint64_t calls = 0, failed = 0;
    struct timespec pause = {0, 120000000};
    nanosleep(&pause, NULL);
    for (int d = 0; d < ground_count; d++) ground_settle(&workers[worker_count], d);
    for (int i = 0; i <= worker_count; i++) {
        calls += workers[i].calls;
        failed += workers[i].failed;
    }
    printf("%s %d %llu %llu %llu %llu\n", what, round, (unsigned long long)calls, (unsigned long long)failed,
           (unsigned long long)since, (unsigned long long)now_ns());
    fflush(stdout);
    return fgets(line, sizeof line, stdin) != NULL;
}

int soak(uint64_t seed, uint64_t calls, int threads, int devices, int rounds) {
    pthread_t thread[THREADS];
    if (threads < 1 || threads > THREADS || devices < 1 || devices > DEVICES || rounds < 1) {
        fprintf(stderr, "mixer: at most %d threads and %d devices, at least one round\n", THREADS, DEVICES);
        return 2;
    }
    worker_count = threads;
    ground_count = devices;
    worker *self = &workers[threads];
    for (int i = 0; i <= threads; i++) workers[i].state = seed * 1000 + (uint64_t)i;
    for (int d = 0; d < devices; d++) ground_begin(self, d);
    pthread_barrier_init(&begin, NULL, (unsigned)threads + 1);
    pthread_barrier_init(&end, NULL, (unsigned)threads + 1);
    for (int i = 0; i < threads; i++) pthread_create(&thread[i], NULL, work, &workers[i]);
    printf("ready pid=%d\n", (int)getpid());
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < threads; i++)
            workers[i].owed = calls * (uint64_t)(round + 1) / (uint64_t)rounds / (uint64_t)threads;
        pthread_barrier_wait(&begin);
        pthread_barrier_wait(&end);
        uint64_t since = now_ns();
        if (round % 4 == 2) ground_shake(self, round / 4 % devices);
        if (round % 8 == 5) reset(self, round / 8 % devices);
        if (!show("round", round, since)) return 0;
    }
    over = 1;
    pthread_barrier_wait(&begin);
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < PLACES; i++)
        if (places[i]) object_end(self, places[i]);
    show("empty", rounds, now_ns());
    return 0;
}
