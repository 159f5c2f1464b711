/* Every report of the program about its memory goes to two places: gpumem (inert if absent) and the simulated driver's
 * oracle (absent on a real driver). */
#ifndef TRAINER_TAGS_H
#define TRAINER_TAGS_H

#include <stdint.h>

enum { PARAMETER = 1, GRADIENT, OPTIMIZER_STATE, ACTIVATION, INPUT, TEMPORARY, WORKSPACE, BUFFER };
enum { SETUP = 1, FORWARD, BACKWARD, OPTIMIZER };

void tags_init(void *driver);
int tags_available(void); /* 1: a gpumem library listens */
void push(const char *name);
void pop(void);
void process_tag(const char *path);
void inherit(void); /* a thread without scopes: what the process says now */
const char *path_now(void);
void step_is(uint64_t number);
void phase_is(int phase);
void mark(const char *name);
void retag(uint64_t pool, uint64_t address, const char *path, int role, int phase);

uint64_t pool_new(const char *name, int ordinal, uint64_t parent);
void pool_end(uint64_t pool);
void segment_new(uint64_t pool, uint64_t address, uint64_t bytes);
void segment_end(uint64_t pool, uint64_t address, uint64_t bytes);
void block_new(uint64_t pool, uint64_t address, uint64_t bytes);
void block_end(uint64_t pool, uint64_t address);
void pool_says(uint64_t pool, uint64_t used); /* its own total, to be checked against the blocks */

#endif
