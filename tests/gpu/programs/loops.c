/* Commands that repeat a call many times and report the duration. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda.h"

static int stream_ordered; /* by cuMemAllocAsync */

/* One allocation and its free, `count` times: ns a pair, or -1. */
static double pairs(size_t bytes, uint64_t count, result *r) {
    uint64_t since = now_ns();
    for (uint64_t i = 0; i < count; i++) {
        address where = 0;
        if (stream_ordered)
            *r = cuMemAllocAsync(&where, bytes, stream) || cuMemFreeAsync(where, stream);
        else
            *r = cuMemAlloc(&where, bytes) || cuMemFree(where);
        if (*r) return -1;
    }
    double each = (double)(now_ns() - since) / (double)count;
    if (stream_ordered) cuStreamSynchronize(stream);
    return each;
}

static void choose(const char *how) {
    stream_ordered = !strcmp(how, "async");
    if (stream_ordered && !stream) cuStreamCreate(&stream, 1);
    uint64_t keep_all = 1ull << 40;
    void *pool = NULL;
    if (stream_ordered && !cuDefaultPool(&pool, device)) cuPoolSet(pool, 4, &keep_all);
}

/* Waits longer than the agent's sender needs for a block, so that recording is measured and not the dropping of
 * records. */
static void rest(void) {
    struct timespec pause = {0, 30000000};
    nanosleep(&pause, NULL);
}

static void print_all(const double *values, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) printf("%s%.1f", i ? "," : "", values[i]);
}

/* BLOCKS means of COUNT pairs each; COUNT well below the slots of the agent's ring. */
static void bench(void) {
    size_t bytes = number();
    uint64_t count = number(), blocks = number();
    double *mean = calloc(blocks, sizeof *mean);
    result r = 0;
    choose(word());
    pairs(bytes, count, &r);
    for (uint64_t b = 0; b < blocks && !r; b++) {
        rest();
        mean[b] = pairs(bytes, count, &r);
    }
    printf("{\"result\":%d,\"means\":[", r);
    print_all(mean, r ? 0 : blocks);
    printf("]}\n");
    fflush(stdout);
    free(mean);
}

/* The same in one process, with the agent alternately paused and active; the order changes each round. */
static void bench_paired(void) {
    size_t bytes = number();
    uint64_t count = number(), rounds = number();
    double *mean[2] = {calloc(rounds, sizeof(double)), calloc(rounds, sizeof(double))};
    result r = gpumem_pause && gpumem_resume ? 0 : NOT_FOUND;
    choose(word());
    for (uint64_t b = 0; b < rounds && !r; b++)
        for (int i = 0; i < 2 && !r; i++) {
            int on = (int)(b & 1) ^ i;
            if (on)
                gpumem_resume();
            else
                gpumem_pause();
            rest();
            pairs(bytes, count / 10 + 1, &r);
            if (!r) mean[on][b] = pairs(bytes, count, &r);
        }
    if (gpumem_resume) gpumem_resume();
    printf("{\"result\":%d,\"off\":[", r);
    print_all(mean[0], r ? 0 : rounds);
    printf("],\"on\":[");
    print_all(mean[1], r ? 0 : rounds);
    printf("]}\n");
    fflush(stdout);
    free(mean[0]);
    free(mean[1]);
}

/* ---- threads that run until they are stopped ---- */

#define SLOTS 4096
typedef struct {
    pthread_t thread;
    size_t bytes;
    uint64_t pause_us, steps, failures, worst_ns, worst_at;
    uint64_t slow; /* steps of more than 10 ms */
    uint32_t step_us[SLOTS]; /* of every `every`th step */
    uint64_t every, held;
} loop;
static loop *loops[64];
static int loop_count;
static volatile int stop;

static void *turn(void *argument) {
    loop *l = argument;
    void *context = NULL;
    cuPrimaryRetain(&context, device);
    cuCtxSetCurrent(context);
    address ring[8] = {0};
    while (!stop) {
        uint64_t since = now_ns();
        address *at = &ring[l->steps % 8];
        if (*at && cuMemFree(*at)) l->failures++;
        *at = 0;
        if (cuMemAlloc(at, l->bytes + (l->steps % 7) * 4096)) {
            *at = 0;
            l->failures++;
        }
        uint64_t took = now_ns() - since;
        if (took > l->worst_ns) {
            l->worst_ns = took;
            l->worst_at = since;
        }
        if (took > 10000000) l->slow++;
        if (l->steps % l->every == 0) {
            if (l->steps / l->every == SLOTS) {
                for (int i = 0; i < SLOTS / 2; i++) l->step_us[i] = l->step_us[2 * i];
                l->every *= 2;
            }
            if (l->steps % l->every == 0) l->step_us[l->steps / l->every] = (uint32_t)(took / 1000);
        }
        l->steps++;
        if (l->pause_us) {
            struct timespec rest = {(time_t)(l->pause_us / 1000000), (long)(l->pause_us % 1000000) * 1000};
            nanosleep(&rest, NULL);
        }
    }
    for (int i = 0; i < 8; i++)
        if (ring[i]) cuMemFree(ring[i]);
    cuPrimaryRelease(device);
    return NULL;
}

static void start(void) {
    size_t bytes = number();
    uint64_t pause = number(), threads = number();
    stop = 0;
    for (uint64_t i = 0; i < (threads ? threads : 1) && loop_count < 64; i++) {
        loop *l = calloc(1, sizeof *l);
        if (!l) abort();
        l->bytes = bytes;
        l->pause_us = pause;
        l->every = 1;
        loops[loop_count++] = l;
        if (pthread_create(&l->thread, NULL, turn, l)) abort();
    }
    reply(0, began(), "\"threads\":%d", loop_count);
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void halt(void) {
    stop = 1;
    uint64_t steps = 0, failures = 0, worst = 0, worst_at = 0, slow = 0, half = 0, most = 0;
    for (int i = 0; i < loop_count; i++) {
        loop *l = loops[i];
        pthread_join(l->thread, NULL);
        uint64_t kept = l->steps ? (l->steps - 1) / l->every + 1 : 0;
        qsort(l->step_us, kept, sizeof *l->step_us, by_size);
        if (kept && l->step_us[kept / 2] > half) half = l->step_us[kept / 2];
        if (kept && l->step_us[kept * 99 / 100] > most) most = l->step_us[kept * 99 / 100];
        steps += l->steps;
        failures += l->failures;
        slow += l->slow;
        if (l->worst_ns > worst) {
            worst = l->worst_ns;
            worst_at = l->worst_at;
        }
        free(l);
    }
    loop_count = 0;
    reply(0, began(), "\"steps\":%llu,\"failures\":%llu,\"slow\":%llu,\"worst_ns\":%llu,\"worst_at\":%llu,"
          "\"p50_us\":%llu,\"p99_us\":%llu", (unsigned long long)steps, (unsigned long long)failures,
          (unsigned long long)slow, (unsigned long long)worst, (unsigned long long)worst_at, (unsigned long long)half,
          (unsigned long long)most);
}

const command loop_commands[] = {
    {"bench", bench, "BYTES COUNT BLOCKS [async]"}, {"bench_paired", bench_paired, "BYTES COUNT ROUNDS [async]"},
    {"start", start, "BYTES PAUSE_US THREADS"}, {"stop", halt, ""}, {NULL, NULL, NULL},
};
