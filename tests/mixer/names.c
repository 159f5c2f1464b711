#include "names.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "gpumem.h"

static void (*sim_tag)(const char *path);
static void (*sim_segment)(uint64_t address, uint64_t bytes);
static void (*sim_block)(uint64_t address, uint64_t bytes, const char *tag);
static void (*sim_retag)(uint64_t address, const char *tag);
static void (*sim_hold)(int on);

static _Thread_local char path[256];

void names_init(void *driver) {
    *(void **)&sim_tag = dlsym(driver, "gpumemSimTag");
    *(void **)&sim_segment = dlsym(driver, "gpumemSimSegment");
    *(void **)&sim_block = dlsym(driver, "gpumemSimBlock");
    *(void **)&sim_retag = dlsym(driver, "gpumemSimRetag");
    *(void **)&sim_hold = dlsym(driver, "gpumemSimHold");
}

const char *name_now(void) { return path; }

void name_is(const char *to) {
    if (path[0]) gpumem_pop();
    snprintf(path, sizeof path, "%s", to);
    if (path[0]) gpumem_push(path);
    if (sim_tag) sim_tag(path);
}

/* Sets the name for threads without one. The oracle has no such function: it accepts names only for threads. */
void process_name_is(const char *to) { gpumem_process_tag(to); }

/* Makes a report to gpumem and the same report to the oracle one change. */
static void hold(int on) {
    if (sim_hold) sim_hold(on);
}

void rename_at(uint64_t address, const char *to) {
    hold(1);
    gpumem_retag(0, address, to, GPUMEM_ROLE_PARAMETER, GPUMEM_PHASE_UNKNOWN);
    if (sim_retag) sim_retag(address, to);
    hold(0);
}

uint64_t caching_new(const char *name, int ordinal) { return gpumem_pool_create(name, ordinal, 0); }
void segment_new(uint64_t pool, uint64_t address, uint64_t bytes) {
    hold(1);
    gpumem_segment_add(pool, address, bytes);
    if (sim_segment) sim_segment(address, bytes);
    hold(0);
}
/* The oracle forgets a segment with the memory under it. */
void segment_end(uint64_t pool, uint64_t address, uint64_t bytes) { gpumem_segment_remove(pool, address, bytes); }
void block_new(uint64_t pool, uint64_t address, uint64_t bytes) {
    hold(1);
    gpumem_block_alloc(pool, address, bytes, 0);
    if (sim_block) sim_block(address, bytes, path);
    hold(0);
}
void block_end(uint64_t pool, uint64_t address) {
    hold(1);
    gpumem_block_free(pool, address, 0);
    if (sim_block) sim_block(address, 0, NULL);
    hold(0);
}
