/* Makes every change that moves the gap, one for each SIGUSR1: it makes the next change, prints it, and waits.
   The steps of the gap must be attributed to the names of its scopes. */
#include "gpumem.h"

#include <dlfcn.h>
#include <elf.h>
#include <libgen.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CALLS(X)                                                                                                      \
    X(cuInit, (unsigned))                                                                                             \
    X(cuDevicePrimaryCtxRetain, (void **, int))                                                                       \
    X(cuDevicePrimaryCtxRelease_v2, (int))                                                                            \
    X(cuCtxSetCurrent, (void *))                                                                                      \
    X(cuCtxSetLimit, (int, size_t))                                                                                   \
    X(cuModuleLoadData, (void **, const void *))                                                                      \
    X(cuModuleUnload, (void *))                                                                                       \
    X(cuModuleGetFunction, (void **, void *, const char *))                                                           \
    X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))\
    X(cuMemAlloc_v2, (uint64_t *, size_t))                                                                            \
    X(cuMemFree_v2, (uint64_t))
#define FIELD(name, parameters) static int (*name) parameters;
CALLS(FIELD)

static void *context, *first, *second;
static uint64_t own, small, of_library;

static void must(int result, const char *what) {
    if (!result) return;
    fprintf(stderr, "gap: %s: %d\n", what, result);
    exit(4);
}

static void load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    must(!library, "libcuda.so.1");
#define LOAD(name, parameters) must(!(*(void **)&name = dlsym(library, #name)), #name);
    CALLS(LOAD)
}

/* A module with a loaded section of `bytes`, and a section that is not loaded. */
static void load(void **module, uint64_t bytes) {
    struct {
        Elf64_Ehdr header;
        Elf64_Shdr section[3];
    } image = {.section[1] = {.sh_type = SHT_NOBITS, .sh_flags = SHF_ALLOC, .sh_size = bytes},
               .section[2] = {.sh_type = SHT_NOBITS, .sh_size = 1 << 30}};
    memcpy(image.header.e_ident, ELFMAG, SELFMAG);
    image.header.e_ident[EI_CLASS] = ELFCLASS64;
    image.header.e_ident[EI_DATA] = ELFDATA2LSB;
    image.header.e_ident[EI_VERSION] = EV_CURRENT;
    image.header.e_type = ET_EXEC;
    image.header.e_machine = 190; /* EM_CUDA */
    image.header.e_version = EV_CURRENT;
    image.header.e_ehsize = sizeof(Elf64_Ehdr);
    image.header.e_shentsize = sizeof(Elf64_Shdr);
    image.header.e_shoff = sizeof(Elf64_Ehdr);
    image.header.e_shnum = 3;
    must(cuModuleLoadData(module, &image), "cuModuleLoadData");
}

static void *open_library(void) {
    char path[4096];
    if (!realpath("/proc/self/exe", path)) exit(3);
    strcat(dirname(path), "/libgaplib.so");
    void *library = dlopen(path, RTLD_NOW);
    must(!library, "libgaplib.so");
    return library;
}

static void init(void) {
    must(cuInit(0), "cuInit");
    int (*descend)(int);
    *(void **)&descend = dlsym(open_library(), "gaplib_descend");
    must(descend(200) != 200, "gaplib_descend");
    must(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
}
static void load_first(void) { load(&first, (5 << 20) + 12345); }
static void load_second(void) { load(&second, 9 << 20); }
static void launch(void) {
    void *kernel;
    must(cuModuleGetFunction(&kernel, second, "kernel"), "cuModuleGetFunction");
    must(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
}
static void stack(void) { must(cuCtxSetLimit(0, 4096), "cuCtxSetLimit"); }
static void allocate(void) {
    must(cuMemAlloc_v2(&own, (3 << 20) + 512), "cuMemAlloc");
    must(cuMemAlloc_v2(&small, 4096), "cuMemAlloc");
}
static void allocate_elsewhere(void) {
    int (*take)(int (*)(uint64_t *, size_t), uint64_t *, size_t);
    *(void **)&take = dlsym(open_library(), "gaplib_take");
    must(take(cuMemAlloc_v2, &of_library, 64 << 20), "gaplib_take");
}
static void heap(void) { must(cuCtxSetLimit(2, 64 << 20), "cuCtxSetLimit"); }
static void nothing(void) {}
static void unload_first(void) { must(cuModuleUnload(first), "cuModuleUnload"); }
static void unstack(void) { must(cuCtxSetLimit(0, 1024), "cuCtxSetLimit"); }
static void give_back(void) { must(cuMemFree_v2(own) || cuMemFree_v2(small), "cuMemFree"); }

static const struct {
    const char *name;
    void (*act)(void);
} stages[] = {
    {"init", init},
    {"model/first", load_first},
    {"model/second", load_second},
    {"run/launch", launch}, /* with lazy loading, the rest of its module is loaded now */
    {"run/stack", stack},
    {"run/allocate", allocate},
    {"run/library", allocate_elsewhere},
    {"run/heap", heap},
    {"quiet", nothing}, /* meanwhile the test makes the driver's memory grow */
    {"end/unload", unload_first},
    {"end/unstack", unstack},
    {"end/free", give_back},
};

int main(void) {
    sigset_t set;
    int signal;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    load_driver();
    puts("ready");
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        sigwait(&set, &signal);
        gpumem_push(stages[i].name);
        stages[i].act();
        gpumem_pop();
        printf("did %s\n", stages[i].name);
    }
    sigwait(&set, &signal);
    return 0;
}
