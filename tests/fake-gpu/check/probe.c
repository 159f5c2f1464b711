/* An injected library that subscribes, for the self-test. Writes one line per load and one at the end to $PROBE_OUT:
 *   loaded RESULT-OF-SUBSCRIBE RESULT-OF-A-SECOND-ONE
 *   seen ENTERS EXITS ALLOCATIONS FREES BYTES RESOURCES OVERTAKEN BAD
 * OVERTAKEN: an allocation returned an address whose free, on another thread, had not returned yet.
 * $PROBE_RETURN: what InitializeInjection returns (1). $PROBE_CUPTI: library to open (libcupti.so.12). */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    uint32_t site, pad;
    const char *name;
    const void *params;
    const uint32_t *result;
    const char *symbol;
    void *context;
    uint32_t context_uid, pad2;
    uint64_t *correlation;
    uint32_t correlation_id;
} data;

static _Atomic uint64_t enters, exits, allocations, frees, resources, overtaken, bad, bytes;
static _Atomic uint64_t freeing[4096]; /* addresses whose free is in flight, by hash */

static void line(const char *text) {
    const char *path = getenv("PROBE_OUT");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd < 0) return;
    if (write(fd, text, strlen(text)) < 0) bad++;
    close(fd);
}

static _Atomic uint64_t *place(uint64_t address) { return &freeing[(address >> 9) * 2654435761u % 4096]; }

static void on_call(void *user, uint32_t domain, uint32_t cbid, const void *what) {
    (void)user;
    if (domain == 3) {
        resources++;
        return;
    }
    const data *d = what;
    if (domain != 1 || !d->name || !d->params || !d->correlation) {
        bad++;
        return;
    }
    if (d->site == 0) {
        enters++;
        *d->correlation = cbid * 1000003ull;
    } else {
        exits++;
        if (*d->correlation != cbid * 1000003ull || !d->context) bad++;
    }
    if (cbid == 243) {
        const struct {
            uint64_t *dptr;
            size_t bytes;
        } *p = d->params;
        if (strcmp(d->name, "cuMemAlloc_v2")) bad++;
        if (d->site == 1 && *d->result == 0) {
            allocations++;
            bytes += p->bytes;
            if (*place(*p->dptr) == *p->dptr) overtaken++;
        }
    }
    if (cbid == 245) {
        uint64_t address = *(const uint64_t *)d->params;
        if (d->site == 0) {
            *place(address) = address;
        } else {
            uint64_t mine = address;
            atomic_compare_exchange_strong(place(address), &mine, 0);
            frees += *d->result == 0;
        }
    }
}

static void at_end(void) {
    char text[256];
    snprintf(text, sizeof text, "seen %llu %llu %llu %llu %llu %llu %llu %llu\n", (unsigned long long)enters,
             (unsigned long long)exits, (unsigned long long)allocations, (unsigned long long)frees,
             (unsigned long long)bytes, (unsigned long long)resources, (unsigned long long)overtaken,
             (unsigned long long)bad);
    line(text);
}

int InitializeInjection(void) {
    const char *name = getenv("PROBE_CUPTI"), *back = getenv("PROBE_RETURN");
    void *library = dlopen(name ? name : "libcupti.so.12", RTLD_NOW | RTLD_LOCAL);
    uint32_t (*subscribe)(void **, void (*)(void *, uint32_t, uint32_t, const void *), void *) = NULL;
    uint32_t (*enable)(uint32_t, void *, uint32_t, uint32_t) = NULL;
    uint32_t (*init)(unsigned) = NULL;
    void *subscriber = NULL, *second = NULL, *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    uint32_t result = 999, again = 999;
    char text[64];
    if (driver) *(void **)&init = dlsym(driver, "cuInit");
    if (!init || init(0)) bad++; /* nested: returns at once */
    if (library) {
        *(void **)&subscribe = dlsym(library, "cuptiSubscribe");
        *(void **)&enable = dlsym(library, "cuptiEnableCallback");
        result = subscribe(&subscriber, on_call, NULL);
        again = subscribe(&second, on_call, NULL);
    }
    if (!result) {
        enable(1, subscriber, 1, 243);
        enable(1, subscriber, 1, 245);
        enable(1, subscriber, 3, 1);
        enable(1, subscriber, 3, 6);
        if (enable(1, subscriber, 1, 1000) == 0) bad++; /* beyond this library's table */
    }
    snprintf(text, sizeof text, "loaded %u %u\n", result, again);
    line(text);
    int value = back ? atoi(back) : 1;
    if (value) atexit(at_end);
    return value;
}
