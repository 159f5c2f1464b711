/* NCCL: there is no peer, and every operation completes at once. A communicator allocates its buffers, as the real one does. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
/* Buffers of a communicator: two for each of 16 channels. */
#define BUFFERS 32
#define BUFFER_BYTES (4 << 20)

typedef struct {
    char bytes[128];
} unique_id;

typedef struct {
    void *buffers;
} communicator;

static int call(const char *function, void *buffers, size_t bytes) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    void *found = driver ? dlsym(driver, function) : NULL;
    if (!found) return 1;
    if (!bytes) return ((int (*)(void *))found)(buffers);
    return ((int (*)(void *, size_t))found)(buffers, bytes);
}

static int create(communicator **out) {
    const char *set = getenv("NCCL_BUFFSIZE");
    size_t bytes = set ? strtoull(set, NULL, 10) : BUFFER_BYTES;
    communicator *made = calloc(1, sizeof *made);
    if (!made || call("cuMemAlloc_v2", &made->buffers, BUFFERS * bytes)) {
        free(made);
        return 1;
    }
    *out = made;
    return 0;
}

static int destroy(communicator *of) {
    if (of) call("cuMemFree_v2", of->buffers, 0);
    free(of);
    return 0;
}

EXPORT int ncclCommInitRank(communicator **out, int ranks, unique_id id, int rank) {
    (void)ranks, (void)id, (void)rank;
    return create(out);
}
EXPORT int ncclCommInitRankConfig(communicator **out, int ranks, unique_id id, int rank, void *config) {
    (void)ranks, (void)id, (void)rank, (void)config;
    return create(out);
}
EXPORT int ncclCommInitRankScalable(communicator **out, int ranks, int rank, int ids, unique_id *id, void *config) {
    (void)ranks, (void)rank, (void)ids, (void)id, (void)config;
    return create(out);
}
EXPORT int ncclCommSplit(communicator *from, int color, int key, communicator **out, void *config) {
    (void)from, (void)color, (void)key, (void)config;
    return create(out);
}
EXPORT int ncclCommDestroy(communicator *of) { return destroy(of); }
EXPORT int ncclCommAbort(communicator *of) { return destroy(of); }

EXPORT int ncclCommCount(communicator *of, int *ranks) {
    (void)of;
    *ranks = 1;
    return 0;
}
EXPORT const char *ncclGetErrorString(int result) { return result ? "unhandled cuda error" : "no error"; }
EXPORT const char *ncclGetLastError(communicator *of) {
    (void)of;
    return "";
}

/* PyTorch 2.7 and 2.8 wait at their end until this returns success. */
EXPORT int ncclCommGetAsyncError(communicator *of, int *state) {
    (void)of;
    *state = 0;
    return 0;
}
