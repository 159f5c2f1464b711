/* Random load: in rounds, threads fill and empty a table of slots with memory of all kinds, and free each other's.
 * Between two rounds all threads pause, and the parent process inspects the state. */
#ifndef MIXER_SOAK_H
#define MIXER_SOAK_H

#include <stdint.h>

#define DEVICES 16

int soak(uint64_t seed, uint64_t calls, int threads, int devices, int rounds);

/* objects.c: one piece of memory of any kind. */
typedef struct object object;
typedef struct {
    uint64_t state;          /* of the random numbers */
    uint64_t calls, failed;  /* calls of the driver so far, and those that it refused */
    uint64_t owed;           /* calls that are still to be made in this round */
} worker;
uint64_t roll(worker *w, uint64_t below);
object *object_new(worker *w, int ordinal);    /* NULL: refused */
void object_end(worker *w, object *o);
int object_device(const object *o);
void object_lost(object *o); /* its device was reset */
void misuse(worker *w, int ordinal);     /* calls that must fail and change nothing */
void pass_by(worker *w, int ordinal);    /* a separate context, destroyed with its live memory */

typedef struct {
    void *context, *own_pool, *default_pool;
    uint64_t caching;
} ground;
extern ground grounds[DEVICES];
void ground_begin(worker *w, int ordinal);
void ground_shake(worker *w, int ordinal); /* pools trimmed, destroyed and made again */
void ground_settle(worker *w, int ordinal);
void ground_lost(worker *w, int ordinal); /* before a reset */

#endif
