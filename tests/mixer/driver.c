#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

driver_calls cu;

void *driver_load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "mixer: %s\n", dlerror());
        exit(3);
    }
#define LOAD(name, parameters)                                      \
    *(void **)&cu.name = dlsym(library, #name);                     \
    if (!cu.name) {                                                 \
        fprintf(stderr, "mixer: no %s in the driver\n", #name);     \
        exit(3);                                                    \
    }
    DRIVER_CALLS(LOAD)
    return library;
}

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}
