/* The simulated libcupti: subscription and callbacks. Built for each soname with the version number, the size of
 * the callback table and the set of functions that the real one of that name has (SIM_CUPTI 11, 12, 13).
 *
 * $GPUMEM_SIM_CUPTI, for one process: words separated by commas
 *   subscribe:N    every subscribe gives N           subscribe:NxK   only the first K do
 *   enable:N       every cuptiEnableCallback gives N version:N size:N multi:1 silent:1 old:NAME (the blocker's name)
 *   finalize:MS    cuptiFinalize takes that long
 *   anonymous:1    cuptiGetContextId and cuptiGetDeviceId fail
 * Keys cupti.* of the machine do the same for all processes, and may change while they run. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"
#include "thread_data.h"

#define EXPORT __attribute__((visibility("default")))
#if SIM_CUPTI == 11
enum { VERSION = 18, SIZE = 677, ABSENT = 15 };
#elif SIM_CUPTI == 12
enum { VERSION = 28, SIZE = 784, ABSENT = 15 };
#else
enum { VERSION = 130202, SIZE = 846, ABSENT = 999 };
#endif
enum { OK = 0, INVALID_PARAMETER = 1, MULTIPLE = 39, DRIVER_API = 1, RESOURCE = 3, STATE = 6, SUBSCRIBERS = 4 };

typedef void callback(void *userdata, uint32_t domain, uint32_t cbid, const void *data);

typedef struct {
    int used, multi;
    callback *call;
    void *userdata;
    char name[64];
    _Atomic uint32_t api[32];
    _Atomic uint32_t resource, state;
} subscriber;

typedef struct {
    uint32_t site;
    const char *name;
    const void *params;
    const uint32_t *result;
    const char *symbol;
    void *context;
    uint32_t context_uid;
    uint64_t *correlation;
    uint32_t correlation_id;
} callback_data;
_Static_assert(sizeof(callback_data) == 72, "as all versions have it");

typedef struct {
    void *context, *stream;
    const void *descriptor;
} resource_data;

static subscriber subscribers[SUBSCRIBERS];
static sim_hook hook;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sim_machine *machine;
static sim_get_context_uid *context_uid_of, *context_device_of;
static int refusals; /* so far, for subscribe:NxK */
static _Atomic int finalizing;

/* What a real CUPTI might not survive: a call while another client finalizes it, a handle from before. */
static void violation(void) {
    if (machine) __atomic_add_fetch(&machine->violations, 1, __ATOMIC_RELAXED);
}
static void entered(void) {
    leave_thread_data();
    if (finalizing) violation();
}

static uint32_t setting(const char *name, uint32_t otherwise, uint32_t *times) {
    const char *at = getenv("GPUMEM_SIM_CUPTI");
    size_t length = strlen(name);
    for (; at && *at; at += strcspn(at, ","), at += *at == ',') {
        if (strncmp(at, name, length) || at[length] != ':') continue;
        char *end;
        uint32_t value = (uint32_t)strtoul(at + length + 1, &end, 10);
        if (times) *times = *end == 'x' ? (uint32_t)strtoul(end + 1, NULL, 10) : 0;
        return value;
    }
    return otherwise;
}

static uint32_t version(void) { return setting("version", VERSION, NULL); }
static uint32_t size(void) { return setting("size", SIZE, NULL); }

/* A version that this library does not name yet keeps silent about itself when there is no driver. */
static void *driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    sim_get_machine *get = NULL;
    if (library) *(void **)&get = dlsym(library, "gpumemSimMachine");
    if (get) machine = get();
    if (library) *(void **)&context_uid_of = dlsym(library, "gpumemSimContextUid");
    if (library) *(void **)&context_device_of = dlsym(library, "gpumemSimContextDevice");
    return machine ? library : NULL;
}

static int mute; /* silent:1, looked up when somebody subscribes */
static int silent(void) { return mute || machine->cupti_silent; }

/* The end of the driver: nothing is delivered afterwards until a client subscribes again. */
static void fatal(void) {
    struct {
        uint32_t result;
        const char *message;
    } state = {999, "simulated fatal error"};
    machine->cupti_fatal = 0;
    for (int i = 0; i < SUBSCRIBERS; i++) {
        subscriber *s = &subscribers[i];
        if (s->used && s->state >> 1 & 1) s->call(s->userdata, STATE, 1, &state);
        for (int w = 0; w < 32; w++) s->api[w] = 0;
        s->resource = s->state = 0;
        s->used = 0;
    }
    for (int w = 0; w < 32; w++) hook.api[w] = 0;
    hook.resource = 0;
}

static void on_api(const sim_api_call *c) {
    if (machine->cupti_fatal) fatal();
    if (silent()) return;
    callback_data data = {c->site,    c->name,        c->params,      c->result,        NULL,
                          c->context, c->context_uid, c->correlation, c->correlation_id};
    for (int i = 0; i < SUBSCRIBERS; i++) {
        subscriber *s = &subscribers[i];
        if (s->used && s->api[c->cbid / 32] >> (c->cbid % 32) & 1) s->call(s->userdata, DRIVER_API, c->cbid, &data);
    }
}

static void on_resource(const sim_resource *r) {
    if (silent()) return;
    resource_data data = {r->context, r->stream, r->descriptor};
    for (int i = 0; i < SUBSCRIBERS; i++) {
        subscriber *s = &subscribers[i];
        if (s->used && s->resource >> r->cbid & 1) s->call(s->userdata, RESOURCE, r->cbid, &data);
    }
}

static uint32_t subscribe(subscriber **out, callback *call, void *userdata, const char *name, int multi) {
    void *library = driver();
    uint32_t (*init)(unsigned) = NULL;
    void (*set_hook)(const sim_hook *) = NULL;
    entered();
    if (!out || !call) return INVALID_PARAMETER;
    if (library) {
        *(void **)&init = dlsym(library, "cuInit");
        *(void **)&set_hook = dlsym(library, "gpumemSimSetHook");
    }
    if (!init || !set_hook || init(0) != OK) return ABSENT;
    /* Inside of cuInit, which is going to find no GPU. */
    if (machine->device_count == 0 || machine->nvml_driver == SIM_DRIVER_ABSENT) return ABSENT;
    if (machine->cuda_version / 1000 < SIM_CUPTI) return ABSENT; /* CUPTI of a later major than the driver's */
    uint32_t times = 0, forced = setting("subscribe", 0, &times);
    uint32_t result = (uint32_t)machine->cupti_subscribe;
    mute = setting("silent", 0, NULL) != 0;
    int together = machine->cupti_multi || setting("multi", 0, NULL);
    pthread_mutex_lock(&lock);
    if (forced && (!times || refusals < (int)times)) {
        refusals++;
        result = forced;
    }
    if (multi && !together) result = MULTIPLE;
    subscriber *free = NULL;
    for (int i = 0; i < SUBSCRIBERS; i++) {
        if (!subscribers[i].used && !free) free = &subscribers[i];
        if (subscribers[i].used && !(multi && subscribers[i].multi)) result = MULTIPLE;
    }
    if (!free) result = MULTIPLE;
    if (result == OK) {
        free->call = call;
        free->userdata = userdata;
        free->multi = multi;
        snprintf(free->name, sizeof free->name, "%s", name ? name : "");
        for (int w = 0; w < 32; w++) free->api[w] = 0;
        free->resource = free->state = 0;
        atomic_thread_fence(memory_order_seq_cst);
        free->used = 1;
        *out = free;
        hook.on_api = on_api;
        hook.on_resource = on_resource;
        set_hook(&hook);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT uint32_t cuptiSubscribe(subscriber **out, callback *call, void *userdata) {
    return subscribe(out, call, userdata, NULL, 0);
}

static void merge(void) {
    uint32_t resource = 0;
    for (int w = 0; w < 32; w++) {
        uint32_t bits = 0;
        for (int i = 0; i < SUBSCRIBERS; i++)
            if (subscribers[i].used) bits |= subscribers[i].api[w];
        hook.api[w] = bits;
    }
    for (int i = 0; i < SUBSCRIBERS; i++)
        if (subscribers[i].used) resource |= subscribers[i].resource;
    hook.resource = resource;
}

static int known(const subscriber *s) {
    int is = s >= subscribers && s < subscribers + SUBSCRIBERS && s->used;
    entered();
    if (!is && s) violation();
    return is;
}

EXPORT uint32_t cuptiUnsubscribe(subscriber *s) {
    if (!known(s)) return INVALID_PARAMETER;
    pthread_mutex_lock(&lock);
    s->used = 0;
    merge();
    pthread_mutex_unlock(&lock);
    return OK;
}

static uint32_t enable(uint32_t on, subscriber *s, uint32_t domain, uint32_t cbid) {
    _Atomic uint32_t *word;
    if (!known(s)) return INVALID_PARAMETER;
    if (domain == DRIVER_API && cbid && cbid < size() && cbid < 1024)
        word = &s->api[cbid / 32];
    else if (domain == RESOURCE && cbid && cbid < 32)
        word = &s->resource;
    else if (domain == STATE && SIM_CUPTI >= 12 && cbid && cbid < 4)
        word = &s->state;
    else if (domain == 2 || domain == 4 || domain == 5)
        return OK; /* runtime, synchronize, NVTX: accepted, nothing comes */
    else
        return INVALID_PARAMETER;
    if (on)
        *word |= 1u << cbid % 32;
    else
        *word &= ~(1u << cbid % 32);
    return OK;
}

EXPORT uint32_t cuptiEnableCallback(uint32_t on, subscriber *s, uint32_t domain, uint32_t cbid) {
    uint32_t forced = setting("enable", 0, NULL);
    if (forced) return forced;
    pthread_mutex_lock(&lock);
    uint32_t result = enable(on, s, domain, cbid);
    merge();
    pthread_mutex_unlock(&lock);
    return result;
}
EXPORT uint32_t cuptiEnableDomain(uint32_t on, subscriber *s, uint32_t domain) {
    pthread_mutex_lock(&lock);
    for (uint32_t cbid = 1; cbid < 1024; cbid++) enable(on, s, domain, cbid);
    uint32_t result = known(s) ? OK : INVALID_PARAMETER;
    merge();
    pthread_mutex_unlock(&lock);
    return result;
}
EXPORT uint32_t cuptiGetCallbackState(uint32_t *on, subscriber *s, uint32_t domain, uint32_t cbid) {
    if (!on || !known(s) || cbid >= 1024) return INVALID_PARAMETER;
    *on = domain == DRIVER_API ? s->api[cbid / 32] >> (cbid % 32) & 1 : domain == RESOURCE ? s->resource >> cbid & 1 : 0;
    return OK;
}
/* Detaches CUPTI for every client of the process. */
EXPORT uint32_t cuptiFinalize(void) {
    struct timespec time = {0, setting("finalize", 0, NULL) * 1000000l};
    entered();
    finalizing = 1;
    nanosleep(&time, NULL);
    finalizing = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SUBSCRIBERS; i++) subscribers[i].used = 0;
    merge();
    pthread_mutex_unlock(&lock);
    return OK;
}

EXPORT uint32_t cuptiGetVersion(uint32_t *out) {
    if (!out) return INVALID_PARAMETER;
    entered();
    *out = version();
    return OK;
}

static const struct {
    uint32_t code;
    const char *name;
} results[] = {{0, "CUPTI_SUCCESS"},
               {1, "CUPTI_ERROR_INVALID_PARAMETER"},
               {2, "CUPTI_ERROR_INVALID_DEVICE"},
               {15, "CUPTI_ERROR_NOT_INITIALIZED"},
               {23, "CUPTI_ERROR_DISABLED"},
               {35, "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"},
               {39, "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"},
               {999, "CUPTI_ERROR_UNKNOWN"}};
EXPORT uint32_t cuptiGetResultString(uint32_t code, const char **out) {
    for (size_t i = 0; out && i < sizeof results / sizeof *results; i++)
        if (results[i].code == code) {
            *out = results[i].name;
            return OK;
        }
    return INVALID_PARAMETER;
}
#if SIM_CUPTI >= 12
EXPORT uint32_t cuptiGetErrorMessage(uint32_t code, const char **out) { return cuptiGetResultString(code, out); }
#endif

EXPORT uint32_t cuptiGetCallbackName(uint32_t domain, uint32_t cbid, const char **out) {
    static const struct {
        uint32_t cbid;
        const char *name;
    } names[] = {
#define SIM_CBID(id, name) {id, #name},
#include "cbids.h"
#undef SIM_CBID
    };
    if (!out || domain != DRIVER_API || cbid >= size()) return INVALID_PARAMETER;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].cbid == cbid) {
            *out = names[i].name;
            return OK;
        }
    *out = "cuSimulatedOther";
    return cbid ? OK : INVALID_PARAMETER;
}
EXPORT uint32_t cuptiGetContextId(void *context, uint32_t *out) {
    if (!context || !out || setting("anonymous", 0, NULL) || !driver() || !context_uid_of) return INVALID_PARAMETER;
    *out = context_uid_of(context);
    return OK;
}
EXPORT uint32_t cuptiGetDeviceId(void *context, uint32_t *out) {
    if (!context || !out || setting("anonymous", 0, NULL) || !driver() || !context_device_of) return INVALID_PARAMETER;
    *out = context_device_of(context);
    return OK;
}
EXPORT uint32_t cuptiGetTimestamp(uint64_t *out) {
    if (!out) return INVALID_PARAMETER;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *out = (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
    return OK;
}
EXPORT uint32_t cuptiGetThreadIdType(uint32_t *out) { return out ? (*out = 0, OK) : INVALID_PARAMETER; }
EXPORT uint32_t cuptiSetThreadIdType(uint32_t type) { return type < 2 ? OK : INVALID_PARAMETER; }

#if SIM_CUPTI >= 13
typedef struct {
    size_t size;
    const char *name;
    char *old_name;
    size_t old_size;
    uint8_t multi;
} subscriber_params;

/* The one who holds the subscription. */
static const char *blocker(void) {
    for (int i = 0; i < SUBSCRIBERS; i++)
        if (subscribers[i].used) return subscribers[i].name;
    const char *at = getenv("GPUMEM_SIM_CUPTI");
    static char name[64];
    at = at ? strstr(at, "old:") : NULL;
    snprintf(name, sizeof name, "%.*s", at ? (int)strcspn(at + 4, ",") : 0, at ? at + 4 : "");
    return *name ? name : "Simulated Profiler";
}

/* 32 bytes before 13.2, 40 since; earlier releases refuse the larger size. */
EXPORT uint32_t cuptiSubscribe_v2(subscriber **out, callback *call, void *userdata, subscriber_params *p) {
    if (!p || !(p->size == 32 || (p->size == 40 && version() >= 130200))) return INVALID_PARAMETER;
    if ((p->name && strlen(p->name) > 53) || (p->old_name && p->old_size < 64)) return INVALID_PARAMETER;
    uint32_t result = subscribe(out, call, userdata, p->name, p->size == 40 && p->multi);
    if (result == MULTIPLE && p->old_name && p->old_size) snprintf(p->old_name, p->old_size, "%s", blocker());
    return result;
}
EXPORT uint32_t cuptiGetEnabledCallbacks(subscriber *s, uint32_t domain, uint32_t *ids, uint32_t *room, uint32_t *count) {
    if (!known(s) || !count || domain != DRIVER_API) return INVALID_PARAMETER;
    uint32_t n = 0;
    for (uint32_t cbid = 1; cbid < 1024; cbid++)
        if (s->api[cbid / 32] >> (cbid % 32) & 1) {
            if (ids && room && n < *room) ids[n] = cbid;
            n++;
        }
    *count = n;
    return OK;
}
/* 12: one subscriber, several, or none yet. */
EXPORT uint32_t cuptiActivityGetAttribute_v2(subscriber *s, uint32_t attribute, size_t *room, void *value) {
    (void)s;
    if (attribute != 12 || !room || *room < 1 || !value) return INVALID_PARAMETER;
    *(uint8_t *)value = 2;
    for (int i = 0; i < SUBSCRIBERS; i++)
        if (subscribers[i].used) *(uint8_t *)value = (uint8_t)subscribers[i].multi;
    return OK;
}
EXPORT uint32_t cuptiIsTracingSessionRunning(uint8_t *out) { return out ? (*out = 0, OK) : INVALID_PARAMETER; }
#endif
