#include "tags.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#if __has_include("gpumem.h")
#include "gpumem.h"
#else
/* The header comes with the agent; without it the program runs and reports nothing. */
static int gpumem_available(void) { return 0; }
static void gpumem_push(const char *name) { (void)name; }
static void gpumem_pop(void) {}
static void gpumem_process_tag(const char *path) { (void)path; }
static void gpumem_step(uint64_t number) { (void)number; }
static void gpumem_phase(int phase) { (void)phase; }
static void gpumem_mark(const char *name) { (void)name; }
static uint64_t gpumem_pool_create(const char *name, int ordinal, uint64_t parent) {
    (void)name, (void)ordinal;
    return parent;
}
static void gpumem_pool_destroy(uint64_t pool) { (void)pool; }
static void gpumem_segment_add(uint64_t pool, uint64_t address, uint64_t bytes) {
    (void)pool, (void)address, (void)bytes;
}
static void gpumem_segment_remove(uint64_t pool, uint64_t address, uint64_t bytes) {
    (void)pool, (void)address, (void)bytes;
}
static void gpumem_block_alloc(uint64_t pool, uint64_t address, uint64_t bytes, uint32_t stream) {
    (void)pool, (void)address, (void)bytes, (void)stream;
}
static void gpumem_block_free(uint64_t pool, uint64_t address, int pending) {
    (void)pool, (void)address, (void)pending;
}
static void gpumem_pool_check(uint64_t pool, uint64_t total) { (void)pool, (void)total; }
static void gpumem_retag(uint64_t pool, uint64_t address, const char *path, int role, int phase) {
    (void)pool, (void)address, (void)path, (void)role, (void)phase;
}
#endif

static void (*sim_tag)(const char *path);
static void (*sim_block)(uint64_t address, uint64_t bytes, const char *tag);
static void (*sim_segment)(uint64_t address, uint64_t bytes);
static void (*sim_retag)(uint64_t address, const char *tag);
static void (*sim_hold)(int on);

static _Thread_local char path[256];
static _Thread_local unsigned cut[16], depth; /* where each scope's name begins */
static char of_process[256];

void tags_init(void *driver) {
    *(void **)&sim_tag = dlsym(driver, "gpumemSimTag");
    *(void **)&sim_block = dlsym(driver, "gpumemSimBlock");
    *(void **)&sim_segment = dlsym(driver, "gpumemSimSegment");
    *(void **)&sim_retag = dlsym(driver, "gpumemSimRetag");
    *(void **)&sim_hold = dlsym(driver, "gpumemSimHold");
}

int tags_available(void) { return gpumem_available(); }
const char *path_now(void) { return depth ? path : of_process; }

static void tell(void) {
    if (sim_tag) sim_tag(path_now());
}

void push(const char *name) {
    unsigned length = (unsigned)strlen(path);
    if (depth == 16) return;
    cut[depth++] = length;
    snprintf(path + length, sizeof path - length, "%s%s", length ? "/" : "", name);
    gpumem_push(name);
    tell();
}
void pop(void) {
    if (!depth) return;
    path[cut[--depth]] = 0;
    gpumem_pop();
    tell();
}
void process_tag(const char *name) {
    snprintf(of_process, sizeof of_process, "%s", name ? name : "");
    gpumem_process_tag(name);
    tell();
}
void inherit(void) { tell(); }

void step_is(uint64_t number) { gpumem_step(number); }
void phase_is(int phase) { gpumem_phase(phase); }
void mark(const char *name) { gpumem_mark(name); }
/* Makes a report to the agent and the same report to the oracle one change. */
static void hold(int on) {
    if (sim_hold) sim_hold(on);
}

void retag(uint64_t pool, uint64_t address, const char *to, int role, int phase) {
    hold(1);
    gpumem_retag(pool, address, to, role, phase);
    if (to && !pool && sim_retag) sim_retag(address, to);
    hold(0);
}

uint64_t pool_new(const char *name, int ordinal, uint64_t parent) {
    return gpumem_pool_create(name, ordinal, parent);
}
void pool_end(uint64_t pool) { gpumem_pool_destroy(pool); }
void segment_new(uint64_t pool, uint64_t address, uint64_t bytes) {
    hold(1);
    gpumem_segment_add(pool, address, bytes);
    if (sim_segment) sim_segment(address, bytes);
    hold(0);
}
void segment_end(uint64_t pool, uint64_t address, uint64_t bytes) { gpumem_segment_remove(pool, address, bytes); }
void block_new(uint64_t pool, uint64_t address, uint64_t bytes) {
    hold(1);
    gpumem_block_alloc(pool, address, bytes, 0);
    if (sim_block) sim_block(address, bytes, path_now());
    hold(0);
}
void block_end(uint64_t pool, uint64_t address) {
    hold(1);
    gpumem_block_free(pool, address, 0);
    if (sim_block) sim_block(address, 0, NULL);
    hold(0);
}
void pool_says(uint64_t pool, uint64_t used) { gpumem_pool_check(pool, used); }
