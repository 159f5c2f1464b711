/* Commands of another CUPTI client in this process, with or without the agent. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"

typedef void callback(void *, int, uint32_t, const void *);
typedef struct {
    size_t size; /* 32 before CUPTI 13.2, 40 since */
    const char *name;
    char *old_name;
    size_t old_size;
    uint8_t several;
} subscriber_params;

enum { DRIVER_API = 1, RESOURCE = 3, PRIMARY_RETAIN = 386, CONTEXT_CREATED = 1 };
typedef struct {
    unsigned site; /* 0: the call begins, 1: it returns */
} call_data;
typedef struct {
    void *context;
} resource_data;

static void *cupti, *subscriber[2]; /* by cuptiSubscribe, by cuptiSubscribe_v2 */
static uint64_t heard_count[2];

static void heard(void *user, int domain, uint32_t id, const void *data) {
    (void)domain, (void)id, (void)data;
    ++*(uint64_t *)user;
}

static void *find(const char *name) { return cupti ? dlsym(cupti, name) : NULL; }

static uint32_t open_library(const char *path) {
    uint32_t version = 0, (*get)(uint32_t *);
    cupti = dlopen(path, RTLD_NOW);
    *(void **)&get = find("cuptiGetVersion");
    if (get) get(&version);
    return version;
}

/* LIBRARY; the result of cuptiSubscribe. */
static void subscribe(void) {
    uint32_t version = open_library(word());
    int (*call)(void **, callback *, void *);
    *(void **)&call = find("cuptiSubscribe");
    mark();
    result r = call ? call(&subscriber[0], heard, &heard_count[0]) : -1;
    reply(r, began(), "\"version\":%u", version);
}

/* LIBRARY ALLOW; the result of cuptiSubscribe_v2, and the name of the blocking client. */
static void subscribe_newer(void) {
    uint32_t version = open_library(word());
    char old[64] = "";
    subscriber_params p = {version >= 130200 ? 40 : 32, "gpu-suite", old, sizeof old, (uint8_t)number()};
    int (*call)(void **, callback *, void *, subscriber_params *);
    *(void **)&call = find("cuptiSubscribe_v2");
    mark();
    result r = call ? call(&subscriber[1], heard, &heard_count[1], &p) : -1;
    old[strcspn(old, "\"\\\n")] = 0;
    reply(r, began(), "\"version\":%u,\"old\":\"%s\"", version, old);
}

static void unsubscribe(void) {
    int (*call)(void *);
    *(void **)&call = find("cuptiUnsubscribe");
    void *who = subscriber[0] ? subscriber[0] : subscriber[1];
    subscriber[0] = subscriber[1] = NULL;
    done(call && who ? call(who) : -1);
}

/* Callbacks of cuMemAlloc_v2 for each subscriber, and how many came since. */
static void listen(void) {
    int (*call)(uint32_t, void *, int, uint32_t), r[2] = {-1, -1};
    *(void **)&call = find("cuptiEnableCallback");
    for (int i = 0; i < 2; i++)
        if (subscriber[i] && call) r[i] = call(1, subscriber[i], 1, 243);
    address where = 0;
    heard_count[0] = heard_count[1] = 0;
    result taken = cuMemAlloc(&where, 1 << 20);
    if (!taken) cuMemFree(where);
    reply(taken, began(), "\"enabled\":[%d,%d],\"heard\":[%llu,%llu]", r[0], r[1], (unsigned long long)heard_count[0],
          (unsigned long long)heard_count[1]);
}

/* The last driver callback id that can be enabled, and the results for the following ids. */
static void enable_ids(void) {
    int (*call)(uint32_t, void *, int, uint32_t);
    void *who = subscriber[0] ? subscriber[0] : subscriber[1];
    *(void **)&call = find("cuptiEnableCallback");
    uint32_t last = 0;
    int beyond = -1, far = -1;
    for (uint32_t id = 1; call && who && id < 4096; id++)
        if (!call(1, who, 1, id)) {
            call(0, who, 1, id);
            last = id;
        }
    if (call && who) beyond = call(1, who, 1, last + 1);
    if (call && who) far = call(1, who, 1, 1u << 20);
    reply(call && who ? 0 : -1, began(), "\"last\":%u,\"beyond\":%d,\"far\":%d", last, beyond, far);
}

/* As PyTorch does with TEARDOWN_CUPTI=1: for every client of the process. */
static void finalize(void) {
    int (*call)(void);
    open_library(word());
    *(void **)&call = find("cuptiFinalize");
    mark();
    done(call ? call() : -1);
}

/* ---- how a context is announced ---- */

/* Calls of cuDevicePrimaryCtxRetain, whether one is in progress, CONTEXT_CREATED callbacks and those inside of such a call;
 * then the result of cuptiGetDeviceId inside of the last CONTEXT_CREATED callback, and the device. */
static struct {
    unsigned retains, open, created, inside;
    uint32_t device_result, device;
} contexts;

static void heard_context(void *user, int domain, uint32_t id, const void *data) {
    (void)user;
    if (domain == DRIVER_API && id == PRIMARY_RETAIN) {
        int returns = ((const call_data *)data)->site != 0;
        contexts.open = !returns;
        contexts.retains += returns;
    } else if (domain == RESOURCE && id == CONTEXT_CREATED) {
        uint32_t (*device_of)(void *, uint32_t *);
        *(void **)&device_of = find("cuptiGetDeviceId");
        contexts.created++;
        contexts.inside += contexts.open;
        contexts.device_result = device_of ? device_of(((const resource_data *)data)->context, &contexts.device) : UINT32_MAX;
    }
}

/* LIBCUPTI; the result of cuptiSubscribe. Counts from now on. */
static void watch_contexts(void) {
    uint32_t version = open_library(word());
    int (*make)(void **, callback *, void *), (*enable)(uint32_t, void *, int, uint32_t);
    *(void **)&make = find("cuptiSubscribe");
    *(void **)&enable = find("cuptiEnableCallback");
    mark();
    result r = make && enable ? make(&subscriber[0], heard_context, NULL) : -1;
    if (!r) r = enable(1, subscriber[0], DRIVER_API, PRIMARY_RETAIN);
    if (!r) r = enable(1, subscriber[0], RESOURCE, CONTEXT_CREATED);
    reply(r, began(), "\"version\":%u", version);
}

static void contexts_seen(void) {
    reply(0, began(), "\"retains\":%u,\"created\":%u,\"inside\":%u,\"device_result\":%u,\"device\":%u", contexts.retains,
          contexts.created, contexts.inside, contexts.device_result, contexts.device);
}

/* LIBCUDART makes its primary context, by the call that programs use for it. */
static void cudart(void) {
    void *library = dlopen(word(), RTLD_NOW | RTLD_GLOBAL);
    int (*call)(void *);
    *(void **)&call = library ? dlsym(library, "cudaFree") : NULL;
    mark();
    done(call ? call(NULL) : -1);
}

/* A library that the program happens to have loaded. */
static void load_library(void) { done(dlopen(word(), RTLD_NOW) ? 0 : -1); }

/* The other injected tool (client.c) ends its subscription. */
static void client_end(void) {
    const char *path = word();
    void *client = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    int (*call)(void);
    *(void **)&call = client ? dlsym(client, "client_end") : NULL;
    done(call ? call() : -1);
}

const command cupti_commands[] = {
    {"subscribe", subscribe, "LIBCUPTI"}, {"subscribe_newer", subscribe_newer, "LIBCUPTI ALLOW"},
    {"unsubscribe", unsubscribe, ""}, {"listen", listen, ""}, {"enable_ids", enable_ids, ""},
    {"finalize", finalize, "LIBCUPTI"}, {"client_end", client_end, "LIBRARY"},
    {"watch_contexts", watch_contexts, "LIBCUPTI"}, {"contexts_seen", contexts_seen, ""}, {"cudart", cudart, "LIBCUDART"},
    {"load", load_library, "LIBRARY"}, {NULL, NULL, NULL},
};
