/* A training loop in C that reports the purpose of its memory.
 *
 *     cc -I../agent-lib/include train.c -ldl -o train
 *     gpumemctl run -- ./train
 *
 * Without gpumemctl it runs the same and reports nothing. */
#include "cuda.h"
#include "gpumem.h"

enum { LAYERS = 3, STEPS = 4 };
#define MIB ((size_t)1 << 20)

int main(void) {
    uint64_t weights[LAYERS], gradients[LAYERS], activations[LAYERS];
    uint64_t free_bytes, total_bytes, most_bytes;
    char name[32], *report;
    int layer, step;

    cuda_begin();
    gpumem_configure("ranges", "on"); /* how often and how long each scope was open, too */
    gpumem_phase(GPUMEM_PHASE_SETUP);
    gpumem_push("model");
    for (layer = 0; layer < LAYERS; layer++) {
        snprintf(name, sizeof name, "layer.%d", layer);
        gpumem_push(name); /* model/layer.0 ... */
        weights[layer] = cuda_alloc(8 * MIB);
        gradients[layer] = cuda_alloc(8 * MIB);
        gpumem_retag(0, weights[layer], NULL, GPUMEM_ROLE_PARAMETER, 0);
        gpumem_retag(0, gradients[layer], NULL, GPUMEM_ROLE_GRADIENT, 0);
        gpumem_pop();
    }
    gpumem_pop();

    gpumem_peak(GPUMEM_PEAK_BEGIN);
    gpumem_start(); /* where `gpumem_configure("record_file", ...)` says */
    for (step = 1; step <= STEPS; step++) {
        gpumem_step((uint64_t)step);
        gpumem_phase(GPUMEM_PHASE_FORWARD);
        for (layer = 0; layer < LAYERS; layer++) {
            gpumem_push("activations");
            activations[layer] = cuda_alloc(2 * MIB);
            gpumem_pop();
        }
        gpumem_phase(GPUMEM_PHASE_BACKWARD);
        for (layer = LAYERS - 1; layer >= 0; layer--) MUST(cu.cuMemFree_v2(activations[layer]));
        gpumem_counter_add("samples", 32);
        if (step == 2) gpumem_mark("learning rate halved");
    }
    gpumem_stop();

    if (gpumem_peak_bytes(0, &most_bytes, NULL))
        printf("steps: at most %llu MiB\n", (unsigned long long)(most_bytes >> 20));
    gpumem_peak(GPUMEM_PEAK_END);
    if (gpumem_memory_info(0, &free_bytes, &total_bytes))
        printf("device 0: %llu of %llu MiB free\n", (unsigned long long)(free_bytes >> 20), (unsigned long long)(total_bytes >> 20));
    report = gpumem_dumps("text", "total", 0, 0);
    if (report != NULL) printf("%s", report);
    gpumem_free(report);
    for (layer = 0; layer < LAYERS; layer++) {
        MUST(cu.cuMemFree_v2(gradients[layer]));
        MUST(cu.cuMemFree_v2(weights[layer]));
    }
    MUST(cu.cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}
