/* Event sets: they wait on the machine's event word and use no time meanwhile. */
#include "nvml_internal.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint64_t types[SIM_DEVICES];
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
EXPORT nvmlReturn nvmlEventSetWait_v2(event_set *set, event_data *out, unsigned timeout_ms) {
    BEGIN();
    if (!set || !out) return INVALID_ARGUMENT;
    uint64_t end = sim_now_ns() + timeout_ms * 1000000ull;
    for (int d = 0; d < SIM_DEVICES; d++)
        while (set->types[d] && *(volatile uint64_t *)&machine->device[d].fault_events == SIM_HANG) {
            struct timespec t = {0, 2000000};
            nanosleep(&t, NULL);
        }
    for (;;) {
        uint32_t head = __atomic_load_n(&machine->event_head, __ATOMIC_ACQUIRE);
        if (head - set->seen > SIM_EVENTS) set->seen = head - SIM_EVENTS;
        while (set->seen != head) {
            const sim_event *e = &machine->event[set->seen++ % SIM_EVENTS];
            if (e->device >= SIM_DEVICES || !(set->types[e->device] & e->type)) continue;
            *out = (event_data){&handles[e->device][0], e->type, e->data, ABSENT_ID, ABSENT_ID};
            return OK;
        }
        uint64_t now = sim_now_ns();
        if (now >= end) return TIMED_OUT;
        struct timespec left = {(time_t)((end - now) / 1000000000), (long)((end - now) % 1000000000)};
        syscall(SYS_futex, &machine->event_word, FUTEX_WAIT, head, &left, NULL, 0);
    }
}
EXPORT nvmlReturn nvmlEventSetWait(event_set *set, event_data *out, unsigned timeout_ms) {
    return nvmlEventSetWait_v2(set, out, timeout_ms);
}
