/* The name of this thread's allocations, reported to gpumem and to the simulated driver's oracle; framework pools
 * likewise. */
#ifndef MIXER_NAMES_H
#define MIXER_NAMES_H

#include <stdint.h>

void names_init(void *driver);
void name_is(const char *path); /* this thread's; "" for none */
const char *name_now(void);
void process_name_is(const char *path);
void rename_at(uint64_t address, const char *path);

uint64_t caching_new(const char *name, int ordinal);
void segment_new(uint64_t pool, uint64_t address, uint64_t bytes);
void segment_end(uint64_t pool, uint64_t address, uint64_t bytes);
void block_new(uint64_t pool, uint64_t address, uint64_t bytes);
void block_end(uint64_t pool, uint64_t address);

#endif
