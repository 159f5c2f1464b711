/* Helper threads, the address race, and the fork. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"
#include "tags.h"
#include "work.h"

#define HELPERS 64

static pthread_t threads[HELPERS];
static pthread_barrier_t turn;
static int helper_count, ending;
static device *helped;

/* Thread 0 has no scope and gets the process's name; the others have their own. */
static void *helper(void *argument) {
    long index = (long)argument;
    uint64_t bytes = (uint64_t)(index + 2) * MIB + 8192, address;
    char name[32];
    snprintf(name, sizeof name, "worker.%ld", index);
    must(cu.cuCtxSetCurrent(helped->context), "cuCtxSetCurrent");
    if (index) {
        push("data");
        push(name);
    }
    for (;;) {
        pthread_barrier_wait(&turn);
        if (ending) return NULL;
        if (!index) inherit();
        must(take(helped, bytes, &address), "a helper's buffer");
        pthread_barrier_wait(&turn);
        pthread_barrier_wait(&turn);
        give(helped, address, bytes);
        pthread_barrier_wait(&turn);
    }
}

void helpers_start(device *d, int count) {
    helper_count = count < HELPERS ? count : HELPERS;
    helped = d;
    if (!helper_count) return;
    pthread_barrier_init(&turn, NULL, (unsigned)helper_count + 1);
    for (long i = 0; i < helper_count; i++) pthread_create(&threads[i], NULL, helper, (void *)i);
}
static void twice(void) {
    if (!helper_count) return;
    pthread_barrier_wait(&turn);
    pthread_barrier_wait(&turn);
}
void helpers_take(void) { twice(); }
void helpers_give(void) { twice(); }
void helpers_stop(void) {
    if (!helper_count) return;
    ending = 1;
    pthread_barrier_wait(&turn);
    for (int i = 0; i < helper_count; i++) pthread_join(threads[i], NULL);
    helper_count = 0;
}

/* Everybody takes and gives the same few sizes as fast as it goes: an address that one gives is the next one's at
 * once, often before the giver's call has returned. */
static void *racer(void *argument) {
    long index = (long)argument;
    static const uint64_t sizes[] = {2 * MIB, 2 * MIB, 3 * MIB, 4096};
    char name[32];
    snprintf(name, sizeof name, "thread.%ld", index);
    must(cu.cuCtxSetCurrent(helped->context), "cuCtxSetCurrent");
    push("race");
    push(name);
    for (int i = 0; i < opt.race_loops && !stop; i++) {
        uint64_t address, bytes = sizes[(i + index) % 4];
        if (take(helped, bytes, &address)) continue;
        give(helped, address, bytes);
    }
    return NULL;
}

void race(device *d) {
    pthread_t racers[HELPERS];
    int count = opt.race < HELPERS ? opt.race : HELPERS;
    uint64_t peak = d->peak, begin = now_ns();
    helped = d;
    for (long i = 0; i < count; i++) pthread_create(&racers[i], NULL, racer, (void *)i);
    for (int i = 0; i < count; i++) pthread_join(racers[i], NULL);
    d->peak = peak; /* of the race depends on who met whom */
    if (!opt.quiet)
        printf("race of %d threads: %.0f ns a pair\n", count,
               (double)(now_ns() - begin) / (double)opt.race_loops / (double)count);
}

/* The child may not use CUDA and must end as any program does, with atexit handlers. */
void try_fork(void) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        uint64_t address = 0;
        int result = cu.cuMemAlloc_v2(&address, MIB);
        push("child");
        pop();
        exit(result ? 0 : 6);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status) {
        fprintf(stderr, "trainer: the forked child ended with %d\n", status);
        exit(6);
    }
    if (!opt.quiet) printf("forked child ended well\n");
}
