/* A program driven by commands: one command for each line of standard input, one JSON object as its reply, with the
 * driver's result and the times of the call (CLOCK_MONOTONIC ns). It keeps its own accounts of live memory, which the
 * suite compares with all other figures. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cuda.h"

#define DEFINE(name, symbol, parameters) result(*cu##name) parameters;
FUNCTIONS(DEFINE)
#undef DEFINE
void (*gpumem_push)(const char *), (*gpumem_pop)(void), (*gpumem_step)(uint64_t);
void (*gpumem_pause)(void), (*gpumem_resume)(void);
void (*sim_tag)(const char *);
int device;
void *stream;

static char line[1 << 16], *at = line;
static uint64_t begin;
static row *table;
static int used, room;

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void mark(void) { begin = now_ns(); }
uint64_t began(void) { return begin; }

const char *word(void) {
    while (*at == ' ') at++;
    const char *found = at;
    at += strcspn(at, " ");
    if (*at) *at++ = 0;
    return found;
}

uint64_t number(void) {
    char *end;
    uint64_t value = strtoull(word(), &end, 0);
    const char *units = "KMG", *unit = *end ? strchr(units, *end) : NULL;
    return unit ? value << (10 * (unit - units + 1)) : value;
}

uint64_t number_or(uint64_t missing) {
    while (*at == ' ') at++;
    return *at ? number() : missing;
}

void reply(result r, uint64_t since, const char *format, ...) {
    uint64_t end = now_ns();
    printf("{\"result\":%d,\"t0\":%llu,\"t1\":%llu", r, (unsigned long long)since, (unsigned long long)end);
    printf(",");
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("}\n");
    fflush(stdout);
}

void done(result r) { reply(r, begin, "\"ns\":%llu", (unsigned long long)(now_ns() - begin)); }

int load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) return -1;
#define FIND(name, symbol, parameters) *(void **)&cu##name = dlsym(library, symbol);
    FUNCTIONS(FIND)
#undef FIND
    *(void **)&sim_tag = dlsym(library, "gpumemSimTag");
    return cuInit ? 0 : -1;
}

void load_agent(void) {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *agent = path && *path ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!agent) return;
    *(void **)&gpumem_push = dlsym(agent, "gpumem_push");
    *(void **)&gpumem_pop = dlsym(agent, "gpumem_pop");
    *(void **)&gpumem_step = dlsym(agent, "gpumem_step");
    *(void **)&gpumem_pause = dlsym(agent, "gpumem_pause");
    *(void **)&gpumem_resume = dlsym(agent, "gpumem_resume");
}

int keep(enum kind kind, uint64_t what, uint64_t bytes) {
    if (used == room) {
        room = room ? room * 2 : 256;
        table = realloc(table, (size_t)room * sizeof *table);
        if (!table) abort();
    }
    table[used] = (row){kind, what, bytes, 1, 0};
    return used++;
}

row *kept(uint64_t number) {
    return number < (uint64_t)used && table[number].live ? &table[number] : NULL;
}

row *rows(int *count) {
    *count = used;
    return table;
}

int main(void) {
    if (load_driver()) {
        fprintf(stderr, "no libcuda.so.1: %s\n", dlerror());
        return 3;
    }
    const command *const tables[] = {process_commands, memory_commands, space_commands, loop_commands, table_commands,
                                     cupti_commands};
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        at = line;
        const char *name = word();
        const command *found = NULL;
        for (size_t t = 0; t < sizeof tables / sizeof *tables && !found; t++)
            for (const command *c = tables[t]; c->name; c++)
                if (!strcmp(c->name, name)) {
                    found = c;
                    break;
                }
        mark();
        if (found)
            found->run();
        else
            reply(-1, now_ns(), "\"error\":\"no such command\"");
    }
    return 0;
}
