/* Memory of one device for the training loop, with its own sums for comparison. */
#ifndef TRAINER_MEMORY_H
#define TRAINER_MEMORY_H

#include <pthread.h>
#include <stdint.h>

#define MIB (1ull << 20)
#define SEGMENTS 16
#define BLOCKS 4096

typedef struct {
    uint64_t address, bytes;
} span;

/* A framework's caching pool: segments that stay, blocks cut first-fit at 512 bytes. */
typedef struct {
    uint64_t id, reserved, used;
    span segment[SEGMENTS], block[BLOCKS]; /* blocks in order of address */
    int segments, blocks;
} caching;

typedef struct {
    int ordinal;
    void *context, *stream, *default_pool;
    caching pool;
    uint64_t direct, vmm, driver_pool, peak; /* bytes asked for and live; peak of tracked */
    pthread_mutex_t lock;
    /* growing region */
    uint64_t region, region_bytes, region_grown;
} device;

int take(device *d, uint64_t bytes, uint64_t *address); /* the driver's answer */
void give(device *d, uint64_t address, uint64_t bytes);
int take_async(device *d, uint64_t bytes, uint64_t *address);
void give_async(device *d, uint64_t address);
void look(device *d); /* at what the driver's pool reserves */
int block_take(device *d, uint64_t bytes, uint64_t *address);
void block_give(device *d, uint64_t address);
void pool_release(device *d);
int region_grow(device *d, uint64_t bytes);
void region_release(device *d);
uint64_t tracked(const device *d);
extern _Atomic uint64_t longest_call_ns, calls;

#endif
