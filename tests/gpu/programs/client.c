/* Another tool: an injection library that takes the CUPTI subscription, as a profiler does. $GPU_SUITE_CUPTI is the
 * libcupti that it uses. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void *library, *subscriber;

static void heard(void *user, int domain, uint32_t id, const void *data) { (void)user, (void)domain, (void)id, (void)data; }

int InitializeInjection(void) {
    const char *path = getenv("GPU_SUITE_CUPTI");
    int (*subscribe)(void **, void (*)(void *, int, uint32_t, const void *), void *);
    library = path ? dlopen(path, RTLD_NOW) : NULL;
    *(void **)&subscribe = library ? dlsym(library, "cuptiSubscribe") : NULL;
    int result = subscribe ? subscribe(&subscriber, heard, NULL) : -1;
    fprintf(stderr, "another client: cuptiSubscribe %d\n", result);
    return 1;
}

int client_end(void) {
    int (*unsubscribe)(void *);
    *(void **)&unsubscribe = library ? dlsym(library, "cuptiUnsubscribe") : NULL;
    return unsubscribe && subscriber ? unsubscribe(subscriber) : -1;
}
