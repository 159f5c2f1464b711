/* What a training job does with memory: set-up once, then steps. */
#ifndef TRAINER_WORK_H
#define TRAINER_WORK_H

#include "memory.h"

#define LAYERS 8
#define DEVICES 16

typedef struct {
    uint64_t seed;
    int steps, step_ms, threads, race, race_loops, fork_child, oom, oom_fatal, quiet, leave, release, pool_shrinks, no_cache, leak_modules;
    uint64_t leak;
    double hold;
    int device_count, devices[DEVICES];
} options;

extern options opt;
extern device devices[DEVICES];
extern volatile int stop;

void set_up(device *d);
void train(device *d, int step);
void tear_down(device *d);
void leak(device *d);
void run_out(device *d); /* asks for more than there is */
void race(device *d);
void try_fork(void);

/* Helper threads: they hold memory only between the two calls, so that sums do not depend on their speed. */
void helpers_start(device *d, int count);
void helpers_take(void);
void helpers_give(void);
void helpers_stop(void);

#endif
