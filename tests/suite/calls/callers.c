/* Allocates directly and through libraries, from stacks of every kind. The size identifies caller and stack: 1 MiB + 16
 * * stack + caller. */
#include <alloca.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(uint64_t *out, size_t bytes);
int cuMemFree_v2(uint64_t address);
int cuModuleLoadData(void **module, const void *image);
int cuCtxSetLimit(int limit, size_t value);
int one(uint64_t *out, size_t bytes);
int two(uint64_t *out, size_t bytes);

typedef int allocate(uint64_t *out, size_t bytes);
enum { PROGRAM = 1, ONE, TWO, LATE, LATER };
enum { MAIN, THREAD, GIVEN, COROUTINE, DEEP };
enum { PAGE = 4096, TURNS = 40 };

static void *context;

static void check(int result, const char *what) {
    if (!result) return;
    fprintf(stderr, "%s: %d\n", what, result);
    exit(1);
}

static __attribute__((noinline)) void take(allocate *from, int caller, int stack) {
    uint64_t address = 0;
    check(from(&address, (1u << 20) + 16u * (unsigned)stack + (unsigned)caller), "alloc");
    check(cuMemFree_v2(address), "free");
}

/* Leaves its own return addresses behind, where the driver's frames will be. */
static __attribute__((noinline)) int dirt(int depth) {
    volatile char room[64];
    room[0] = (char)depth;
    return depth ? dirt(depth - 1) + room[0] : room[0];
}

static __attribute__((noinline)) void turns(int stack) {
    for (int turn = 0; turn < TURNS; turn++) {
        take(cuMemAlloc_v2, PROGRAM, stack);
        take(one, ONE, stack);
        if (turn % 3 == 0) dirt(20);
        take(two, TWO, stack);
        take(one, ONE, stack);
        take(cuMemAlloc_v2, PROGRAM, stack);
    }
}

/* Frames begin at every place of a page. */
static __attribute__((noinline)) void deeper(int stack, size_t bytes) {
    volatile char *room = alloca(bytes);
    memset((char *)room, stack, bytes);
    take(cuMemAlloc_v2, PROGRAM, stack);
    take(one, ONE, stack);
    take(two, TWO, stack);
    room[0] = 1;
}

static void *thread(void *stack) {
    check(cuCtxSetCurrent(context), "current");
    turns((int)(intptr_t)stack);
    for (size_t bytes = 16; bytes < 2 * PAGE; bytes += 112) deeper((int)(intptr_t)stack, bytes);
    return NULL;
}

static ucontext_t back, there;
static size_t room_above;

static void coroutine(void) {
    volatile char *room = alloca(room_above + 1);
    room[0] = 1;
    turns(COROUTINE);
    swapcontext(&there, &back);
}

/* A page that must not be read lies directly above its stack. */
static void on_coroutines(void) {
    for (room_above = 0; room_above < 2 * PAGE; room_above += 240) {
        char *stack = mmap(NULL, 18 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) exit(2);
        mprotect(stack, PAGE, PROT_NONE);
        mprotect(stack + 17 * PAGE, PAGE, PROT_NONE);
        getcontext(&there);
        there.uc_stack.ss_sp = stack + PAGE;
        there.uc_stack.ss_size = 16 * PAGE;
        makecontext(&there, coroutine, 0);
        swapcontext(&back, &there);
        munmap(stack, 18 * PAGE);
    }
}

static void on_threads(void) {
    pthread_t id;
    pthread_attr_t attributes;
    pthread_create(&id, NULL, thread, (void *)(intptr_t)THREAD);
    pthread_join(id, NULL);
    char *stack = mmap(NULL, 258 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) exit(2);
    mprotect(stack + 257 * PAGE, PAGE, PROT_NONE);
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, stack + PAGE, 256 * PAGE);
    pthread_create(&id, &attributes, thread, (void *)(intptr_t)GIVEN);
    pthread_join(id, NULL);
}

/* Loaded and used at once. */
static void on_demand(const char *file, const char *name, int caller) {
    void *library = dlopen(file, RTLD_NOW);
    allocate *from;
    if (library) *(void **)&from = dlsym(library, name);
    if (!library || !from) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    for (int turn = 0; turn < TURNS; turn++) take(from, caller, MAIN);
    if (caller == LATER) dlclose(library);
}

int main(void) {
    void *module;
    check(cuInit(0), "init");
    check(cuDevicePrimaryCtxRetain(&context, 0), "retain");
    check(cuCtxSetCurrent(context), "current");
    turns(MAIN);
    for (size_t bytes = 16; bytes < 3 * PAGE; bytes += 48) deeper(DEEP, bytes);
    deeper(DEEP, 1 << 20);
    on_threads();
    on_coroutines();
    on_demand("liblate.so", "late", LATE);
    on_demand("liblater.so", "later", LATER);
    check(cuModuleLoadData(&module, "not an ELF file"), "module");
    check(cuCtxSetLimit(0, 4096), "limit");
    return 0;
}
