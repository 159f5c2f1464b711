/* Event sets, of devices and of the system (R575): they wait on the machine's event word and use no time meanwhile. */
#include "nvml_internal.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint64_t types[SIM_DEVICES + 1]; /* the last: of the system */
    uint32_t seen;
} event_set;
typedef struct {
    const handle *device;
    uint64_t type, data;
    uint32_t gi, ci;
} event_data;
_Static_assert(sizeof(event_data) == 32, "nvmlEventData");

/* 0x400 to 0x8000: DRAM retirement and its failure, poison (non-fatal, fatal), GPU unavailable, recovery action. */
#if SIM_NVML == 3
enum { XID = 8, ALL = 0x1 | 0x2 | 0x8 | 0x100 | 0xfc00 };
#else
enum { XID = 8, ALL = 0x1 | 0x2 | 0x8 | 0x100 };
#endif

EXPORT nvmlReturn nvmlEventSetCreate(event_set **out) {
    BEGIN();
    if (!out) return INVALID_ARGUMENT;
    *out = calloc(1, sizeof **out);
    (*out)->seen = machine->event_head;
    return OK;
}
EXPORT nvmlReturn nvmlEventSetFree(event_set *set) {
    BEGIN();
    free(set);
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetSupportedEventTypes(const handle *h, unsigned long long *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = ALL;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceRegisterEvents(const handle *h, unsigned long long types, event_set *set) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!set || types & ~(unsigned long long)ALL) return NOT_SUPPORTED;
    uint64_t fault = machine->device[h->device].fault_events;
    if (fault >= SIM_CODE) return (nvmlReturn)(fault - SIM_CODE);
    if (fault == SIM_NOT_SUPPORTED) return NOT_SUPPORTED;
    if (fault && fault != SIM_HANG) return UNKNOWN;
    set->types[h->device] |= types;
    return OK;
}
/* Returns the next event that the set is registered for, or NULL after the timeout. */
static const sim_event *next_event(event_set *set, unsigned timeout_ms) {
    uint64_t end = sim_now_ns() + timeout_ms * 1000000ull;
    for (;;) {
        uint32_t head = __atomic_load_n(&machine->event_head, __ATOMIC_ACQUIRE);
        if (head - set->seen > SIM_EVENTS) set->seen = head - SIM_EVENTS;
        while (set->seen != head) {
            const sim_event *e = &machine->event[set->seen++ % SIM_EVENTS];
            if (e->device <= SIM_DEVICES && set->types[e->device] & e->type) return e;
        }
        uint64_t now = sim_now_ns();
        if (now >= end) return NULL;
        struct timespec left = {(time_t)((end - now) / 1000000000), (long)((end - now) % 1000000000)};
        syscall(SYS_futex, &machine->event_word, FUTEX_WAIT, head, &left, NULL, 0);
    }
}
EXPORT nvmlReturn nvmlEventSetWait_v2(event_set *set, event_data *out, unsigned timeout_ms) {
    BEGIN();
    if (!set || !out) return INVALID_ARGUMENT;
    for (int d = 0; d < SIM_DEVICES; d++)
        while (set->types[d] && *(volatile uint64_t *)&machine->device[d].fault_events == SIM_HANG) {
            struct timespec t = {0, 2000000};
            nanosleep(&t, NULL);
        }
    const sim_event *e = next_event(set, timeout_ms);
    if (!e) return TIMED_OUT;
    *out = (event_data){&handles[e->device][0], e->type, e->data, ABSENT_ID, ABSENT_ID};
    return OK;
}
EXPORT nvmlReturn nvmlEventSetWait(event_set *set, event_data *out, unsigned timeout_ms) {
    return nvmlEventSetWait_v2(set, out, timeout_ms);
}

#if SIM_NVML == 3
enum { UNBIND = 1, BIND = 2 };
#define VERSION(type) ((uint32_t)(sizeof(type) | 1 << 24))
typedef struct {
    uint32_t version;
    event_set *set;
} set_request;
typedef struct {
    uint32_t version;
    uint64_t types;
    event_set *set;
} register_request;
typedef struct {
    uint64_t type;
    uint32_t gpu;
} system_event;
typedef struct {
    uint32_t version, timeout_ms;
    event_set *set;
    system_event *data;
    uint32_t room, count;
} wait_request;
_Static_assert(sizeof(set_request) == 16 && sizeof(register_request) == 24 && sizeof(wait_request) == 32, "nvmlSystemEvent...");

EXPORT nvmlReturn nvmlSystemEventSetCreate(set_request *request) {
    BEGIN();
    if (!request) return INVALID_ARGUMENT;
    if (request->version != VERSION(set_request)) return ARGUMENT_VERSION;
    request->set = calloc(1, sizeof *request->set);
    request->set->seen = machine->event_head;
    return OK;
}
EXPORT nvmlReturn nvmlSystemEventSetFree(set_request *request) {
    BEGIN();
    if (!request) return INVALID_ARGUMENT;
    if (request->version != VERSION(set_request)) return ARGUMENT_VERSION;
    free(request->set);
    return OK;
}
EXPORT nvmlReturn nvmlSystemRegisterEvents(register_request *request) {
    BEGIN();
    if (!request || !request->set || request->types & ~(uint64_t)(UNBIND | BIND)) return INVALID_ARGUMENT;
    if (request->version != VERSION(register_request)) return ARGUMENT_VERSION;
    request->set->types[SIM_DEVICES] |= request->types;
    return OK;
}
EXPORT nvmlReturn nvmlSystemEventSetWait(wait_request *request) {
    BEGIN();
    if (!request || !request->set || !request->data || !request->room) return INVALID_ARGUMENT;
    if (request->version != VERSION(wait_request)) return ARGUMENT_VERSION;
    const sim_event *e = next_event(request->set, request->timeout_ms);
    request->count = e != NULL;
    if (!e) return TIMED_OUT;
    request->data[0] = (system_event){e->type, (uint32_t)e->data};
    return OK;
}
#endif
