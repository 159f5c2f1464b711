/* Contents of device memory. Kernels compute nothing, so device memory has no contents, except bytes that were copied to it
 * and that no kernel can have changed since. Programs send numbers through device memory and act on them: DDP sends the
 * layout of its buckets, and indexes with it. So small copies are kept until the next launch of a kernel. All else is zero. */
#include "cudart.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Larger copies are data for kernels. */
#define LARGEST (64 << 10)
#define MOST 64

typedef struct {
    uint64_t address;
    size_t bytes;
    char *data;
} copied;

/* Oldest first: a later copy covers an earlier one. */
static copied kept[MOST];
static size_t count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Forgets the copies that end after `from` and begin before `to`. */
static void forget(uint64_t from, uint64_t to) {
    size_t left = 0;
    for (size_t i = 0; i < count; i++) {
        if (kept[i].address < to && kept[i].address + kept[i].bytes > from)
            free(kept[i].data);
        else
            kept[left++] = kept[i];
    }
    count = left;
}

void contents_forget_all(void) {
    pthread_mutex_lock(&lock);
    forget(0, UINT64_MAX);
    pthread_mutex_unlock(&lock);
}

static void read_kept(char *to, uint64_t address, size_t bytes) {
    memset(to, 0, bytes);
    for (size_t i = 0; i < count; i++) {
        uint64_t first = kept[i].address > address ? kept[i].address : address;
        uint64_t end = kept[i].address + kept[i].bytes, end_wanted = address + bytes;
        if (end > end_wanted) end = end_wanted;
        if (first < end) memcpy(to + (first - address), kept[i].data + (first - kept[i].address), end - first);
    }
}

void contents_read(void *to, uint64_t address, size_t bytes) {
    pthread_mutex_lock(&lock);
    read_kept(to, address, bytes);
    pthread_mutex_unlock(&lock);
}

/* Returns room for that many bytes; NULL if they are too many to be kept. */
static char *room(size_t bytes) { return bytes && bytes <= LARGEST ? malloc(bytes) : NULL; }

/* Keeps `data`, which has these bytes and is ours; NULL forgets what was there. */
static void keep(uint64_t address, char *data, size_t bytes) {
    if (!bytes) {
        free(data);
        return;
    }
    if (!data) {
        forget(address, address + bytes);
        return;
    }
    if (count == MOST) forget(kept[0].address, kept[0].address + 1);
    kept[count++] = (copied){address, bytes, data};
}

void contents_write(uint64_t address, const void *from, size_t bytes) {
    char *data = room(bytes);
    if (data) memcpy(data, from, bytes);
    pthread_mutex_lock(&lock);
    keep(address, data, bytes);
    pthread_mutex_unlock(&lock);
}

void contents_fill(uint64_t address, int value, size_t bytes) {
    char *data = value ? room(bytes) : NULL;
    if (data) memset(data, value, bytes);
    pthread_mutex_lock(&lock);
    keep(address, data, bytes);
    pthread_mutex_unlock(&lock);
}

void contents_move(uint64_t to, uint64_t from, size_t bytes) {
    char *data = room(bytes);
    pthread_mutex_lock(&lock);
    if (data) read_kept(data, from, bytes);
    keep(to, data, bytes);
    pthread_mutex_unlock(&lock);
}
