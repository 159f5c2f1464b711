/* The floor of the bench `daemon`: a bare loop over NVML, one memory call and one list call per GPU. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned gi, ci;
} record;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory;

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 5, hz = argc > 2 ? atof(argv[2]) : 10;
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml) return 1;
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*count)(unsigned *) = (int (*)(unsigned *))dlsym(nvml, "nvmlDeviceGetCount_v2");
    int (*get)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*info)(void *, memory *) = (int (*)(void *, memory *))dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2");
    int (*list)(void *, unsigned *, record *) =
        (int (*)(void *, unsigned *, record *))dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3");
    unsigned devices = 0;
    void *device[16];
    static record records[256];
    if (init() || count(&devices) || devices > 16) return 1;
    for (unsigned d = 0; d < devices; d++)
        if (get(d, &device[d])) return 1;
    struct timespec start, end, next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
    long samples = (long)(seconds * hz);
    unsigned long long sum = 0;
    for (long s = 0; s < samples; s++) {
        for (unsigned d = 0; d < devices; d++) {
            memory m = {.version = 0x02000028};
            unsigned n = 256;
            if (info(device[d], &m) || list(device[d], &n, records)) return 1;
            for (unsigned i = 0; i < n; i++) sum += records[i].bytes;
        }
        next.tv_nsec += (long)(1e9 / hz);
        while (next.tv_nsec >= 1000000000) next.tv_nsec -= 1000000000, next.tv_sec++;
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    double us = ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / 1e3;
    printf("%.3f %llu\n", us / (double)samples, sum);
    return 0;
}
