#include "work.h"

#include <stdio.h>
#include <stdlib.h>

#include "driver.h"
#include "tags.h"

static uint64_t pinned_bytes = 3 * MIB + 4096;

/* The same sequence for the same seed, device and step, whatever else runs. */
static uint64_t random_of(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t x = opt.seed * 0x9e3779b97f4a7c15ull + a * 0xbf58476d1ce4e5b9ull + b * 0x94d049bb133111ebull + c;
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static void layer_name(int layer, char out[32]) { snprintf(out, 32, "layers.%d", layer); }

static uint64_t weights[DEVICES][LAYERS], biases[DEVICES][LAYERS];
static void *modules[DEVICES][2], *pinned[DEVICES];
static uint64_t managed[DEVICES];

static uint64_t weight_bytes(int layer) { return 6 * MIB + (uint64_t)layer * 700 * 1000 + 12; }

static void block(device *d, const char *name, uint64_t bytes, int role, int phase) {
    uint64_t address;
    push(name);
    must(block_take(d, bytes, &address), "a block");
    pop();
    retag(d->pool.id, address, NULL, role, phase);
}

/* Parameters straight from the driver, gradients and optimizer state from the pool. */
void set_up(device *d) {
    int o = d->ordinal;
    char name[32];
    must(cu.cuCtxSetCurrent(d->context), "cuCtxSetCurrent");
    phase_is(SETUP);
    process_tag("model");
    must(cu.cuModuleLoadData(&modules[o][0], "a module's source"), "cuModuleLoadData");
    must(cu.cuStreamCreate(&d->stream, 1), "cuStreamCreate");
    must(cu.cuDeviceGetDefaultMemPool(&d->default_pool, o), "cuDeviceGetDefaultMemPool");
    uint64_t all = UINT64_MAX; /* as frameworks do: what it has once reserved stays */
    if (!opt.pool_shrinks) must(cu.cuMemPoolSetAttribute(d->default_pool, 4, &all), "cuMemPoolSetAttribute");
    d->pool.id = pool_new("caching", o, 0);
    push("model");
    for (int layer = 0; layer < LAYERS; layer++) {
        layer_name(layer, name);
        push(name);
        push("weight");
        must(take(d, weight_bytes(layer), &weights[o][layer]), "a weight");
        pop();
        push("bias");
        must(take(d, 4096 + (uint64_t)layer * 512, &biases[o][layer]), "a bias");
        pop();
        retag(0, weights[o][layer], NULL, PARAMETER, SETUP);
        retag(0, biases[o][layer], NULL, PARAMETER, SETUP);
        block(d, "grad", weight_bytes(layer), GRADIENT, SETUP);
        pop();
    }
    pop();
    push("optimizer");
    for (int layer = 0; layer < LAYERS; layer++) {
        block(d, "exp_avg", weight_bytes(layer), OPTIMIZER_STATE, SETUP);
        block(d, "exp_avg_sq", weight_bytes(layer), OPTIMIZER_STATE, SETUP);
    }
    pop();
    push("loader");
    must(cu.cuMemAllocHost_v2(&pinned[o], pinned_bytes), "cuMemAllocHost");
    must(cu.cuMemAllocManaged(&managed[o], 5 * MIB, 1), "cuMemAllocManaged");
    pop();
    pool_says(d->pool.id, d->pool.used);
}

/* Forward keeps activations, backward gives them back last first, the optimizer borrows from the driver's pool. */
void train(device *d, int step) {
    int o = d->ordinal;
    char name[32];
    uint64_t kept[LAYERS][3], scratch, input;
    must(cu.cuCtxSetCurrent(d->context), "cuCtxSetCurrent");
    phase_is(FORWARD);
    push("input");
    uint64_t input_bytes = 2 * MIB + random_of((uint64_t)step, 1, (uint64_t)o) % 64 * 4096;
    must(take(d, input_bytes, &input), "the input");
    pop();
    push("model");
    for (int layer = 0; layer < LAYERS; layer++) {
        layer_name(layer, name);
        push(name);
        push("activation");
        for (int i = 0; i < 3; i++) {
            uint64_t kib = 200 + random_of((uint64_t)step, (uint64_t)layer * 4 + (uint64_t)i, (uint64_t)o) % 3000;
            must(block_take(d, kib << 10, &kept[layer][i]), "an activation");
        }
        pop();
        push("workspace");
        must(take_async(d, (1 + random_of((uint64_t)step, 77, (uint64_t)layer) % 9) * MIB + 100, &scratch),
             "a workspace");
        give_async(d, scratch);
        pop();
        pop();
    }
    phase_is(BACKWARD);
    for (int layer = LAYERS - 1; layer >= 0; layer--) {
        layer_name(layer, name);
        push(name);
        must(block_take(d, MIB, &scratch), "a gradient in passing");
        for (int i = 2; i >= 0; i--) block_give(d, kept[layer][i]);
        block_give(d, scratch);
        pop();
    }
    pop();
    give(d, input, input_bytes);
    phase_is(OPTIMIZER);
    push("optimizer");
    must(take_async(d, 12 * MIB, &scratch), "a scratch");
    give_async(d, scratch);
    pop();
    if (step % 8 == 3 && !opt.no_cache) {
        push("kv_cache");
        int result = region_grow(d, 4 * MIB);
        if (result != OUT_OF_MEMORY) must(result, "growing the cache");
        pop();
    }
    if (step == 2) must(cu.cuModuleLoadData(&modules[o][1], "another module's source"), "cuModuleLoadData");
    if (opt.leak_modules) {
        void *module; /* its memory is the driver's: only the gap grows */
        must(cu.cuModuleLoadData(&module, "one more module's source"), "cuModuleLoadData");
    }
    must(cu.cuCtxSynchronize(), "cuCtxSynchronize");
    look(d);
    pool_says(d->pool.id, d->pool.used);
}

void tear_down(device *d) {
    int o = d->ordinal;
    must(cu.cuCtxSetCurrent(d->context), "cuCtxSetCurrent");
    pool_release(d);
    region_release(d);
    for (int layer = 0; layer < LAYERS; layer++) {
        give(d, weights[o][layer], weight_bytes(layer));
        give(d, biases[o][layer], 4096 + (uint64_t)layer * 512);
    }
    must(cu.cuMemFreeHost(pinned[o]), "cuMemFreeHost");
    must(cu.cuMemFree_v2(managed[o]), "cuMemFree");
    for (int i = 0; i < 2; i++)
        if (modules[o][i]) must(cu.cuModuleUnload(modules[o][i]), "cuModuleUnload");
    must(cu.cuDevicePrimaryCtxRelease_v2(o), "cuDevicePrimaryCtxRelease");
}

/* Never given back; when the device is full it is over, or it goes on without. */
void leak(device *d) {
    uint64_t address;
    must(cu.cuCtxSetCurrent(d->context), "cuCtxSetCurrent");
    push("history");
    int result = take(d, opt.leak, &address);
    pop();
    if (result != OUT_OF_MEMORY) {
        must(result, "a leak");
        return;
    }
    if (opt.oom_fatal) {
        fprintf(stderr, "trainer: CUDA out of memory. Tried to allocate %llu MiB\n", (unsigned long long)(opt.leak / MIB));
        exit(1);
    }
    opt.leak = 0;
    if (!opt.quiet) printf("out of memory, survived\n");
}

void run_out(device *d) {
    size_t free = 0, total = 0;
    uint64_t address;
    must(cu.cuCtxSetCurrent(d->context), "cuCtxSetCurrent");
    must(cu.cuMemGetInfo_v2(&free, &total), "cuMemGetInfo");
    push("too_much");
    int result = take(d, free + 1024 * MIB, &address);
    pop();
    if (result != OUT_OF_MEMORY) {
        fprintf(stderr, "trainer: asked for more than there is and got %d\n", result);
        exit(5);
    }
    if (opt.oom_fatal) {
        fprintf(stderr, "trainer: CUDA out of memory. Tried to allocate %zu MiB\n", (size_t)(free / MIB + 1024));
        exit(1);
    }
    if (!opt.quiet) printf("out of memory, survived\n");
}
