/* A plug-in of host.c's: brings its own scopes, uses the driver, and goes. */
#include <dlfcn.h>
#include <stdint.h>

#include "gpumem.h"

int plugin_use(int rounds) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*init)(unsigned), (*retain)(void **, int), (*current)(void *), (*take)(uint64_t *, size_t), (*give)(uint64_t);
    int sum = 0;
    if (!driver) return -1;
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&current = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&take = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&give = dlsym(driver, "cuMemFree_v2");
    sum += init(0) + retain(&context, 0) + current(context);
    gpumem_push("plug-in");
    for (int i = 0; i < rounds; i++) {
        uint64_t address;
        sum += take(&address, 65536) + give(address);
    }
    gpumem_pop();
    dlclose(driver);
    return sum;
}
