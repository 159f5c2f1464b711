/* A program with its own CUDA runtime, the default of nvcc (`-cudart static`): libcudart is not loaded, its calls are
 * not visible to others, and the first call opens the driver. The runtime is that of fake-gpu/cudart. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "gpumem.h"
#include "host.h"

int cudaGetDeviceCount(int *), cudaSetDevice(int), cudaDeviceSynchronize(void), cudaDeviceReset(void);
int cudaGetLastError(void), cudaMalloc(void **, size_t), cudaFree(void *), cudaMallocManaged(void **, size_t, unsigned);
int cudaMallocHost(void **, size_t), cudaFreeHost(void *), cudaMallocAsync(void **, size_t, void *), cudaFreeAsync(void *, void *);
int cudaStreamCreateWithFlags(void **, unsigned), cudaStreamSynchronize(void *), cudaStreamDestroy(void *);
int cudaMemcpy(void *, const void *, size_t, int), cudaMemGetInfo(size_t *, size_t *);

static void must(int result, const char *what) {
    if (result) say("%s: %d", what, result);
}

static void round_of(int number) {
    void *address, *managed, *pinned, *of_stream, *stream;
    char here[64] = "not copied to";
    gpumem_push(number % 2 ? "runtime/odd" : "runtime/even");
    must(cudaMalloc(&address, 4096u * (unsigned)(number + 1)), "cudaMalloc");
    must(cudaMallocManaged(&managed, 8192, 1), "cudaMallocManaged");
    must(cudaMallocHost(&pinned, 4096), "cudaMallocHost");
    must(cudaStreamCreateWithFlags(&stream, 1), "cudaStreamCreateWithFlags");
    must(cudaMallocAsync(&of_stream, 65536, stream), "cudaMallocAsync");
    must(cudaMemcpy(here, address, sizeof here, 2), "cudaMemcpy");
    must(cudaFreeAsync(of_stream, stream), "cudaFreeAsync");
    must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    must(cudaStreamDestroy(stream), "cudaStreamDestroy");
    must(cudaFreeHost(pinned), "cudaFreeHost");
    must(cudaFree(managed), "cudaFree");
    must(cudaFree(address), "cudaFree");
    gpumem_pop();
    if (number == 0) say("copied %d", here[0]);
}

static void *worker(void *argument) {
    must(cudaSetDevice(0), "cudaSetDevice");
    for (int i = 0; i < 20; i++) round_of(i);
    return argument;
}

int main(void) {
    pthread_t some[4];
    void *address;
    size_t free_bytes, total;
    int devices = 0;
    must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    must(cudaSetDevice(0), "cudaSetDevice");
    must(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    int refused = cudaMalloc(&address, 1ull << 50), last = cudaGetLastError();
    say("%d devices; without room: %d, then %d and %d", devices, refused, last, cudaGetLastError());
    for (int i = 0; i < 20; i++) round_of(i);
    for (int i = 0; i < 4; i++) pthread_create(&some[i], NULL, worker, NULL);
    for (int i = 0; i < 4; i++) pthread_join(some[i], NULL);
    nap(25);
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    must(cudaMalloc(&address, 1 << 20), "cudaMalloc");
    must(cudaDeviceReset(), "cudaDeviceReset"); /* takes it away */
    round_of(20);
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[1024];
    int shared = 0;
    while (maps && fgets(line, sizeof line, maps)) shared |= strstr(line, "libcudart") != NULL;
    if (maps) fclose(maps);
    say("a runtime that others share: %s", shared ? "yes" : "no");
    view();
    return 0;
}
