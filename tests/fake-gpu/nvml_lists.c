/* Process lists, and the truth journal that is written with each. */
#include "nvml_internal.h"
#include "truth.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_AVAILABLE UINT64_MAX
#define FIRST_GHOST 5000000u /* above every pid that Linux gives */

typedef struct {
    uint32_t pid;
    uint64_t bytes;
    uint32_t gi, ci;
} entry;

enum list { COMPUTE, GRAPHICS, MPS };
static const char *const list_names[] = {"compute", "graphics", "mps"};

/* Buffer in which a list is collected before it is copied to the caller. One list at a time, under the machine's lock. */
static entry *found;
static uint32_t found_count, found_capacity;

static void add(uint32_t pid, uint64_t bytes, uint32_t instance) {
    if (found_count == found_capacity) {
        found_capacity = found_capacity ? found_capacity * 2 : 128;
        found = realloc(found, found_capacity * sizeof *found);
        if (!found) abort();
    }
    found[found_count++] = (entry){pid, bytes, instance ? instance : ABSENT_ID, instance ? 0 : ABSENT_ID};
}

/* ---- lists ---- */

static void collect(const handle *h, enum list list) {
    const sim_device *d = &machine->device[h->device];
    int own = SIM_ASK, truth = truth_wanted(machine);
    uint64_t now = sim_now_ns();
    char uuid[48];
    sim_uuid_text(d->uuid, "GPU-", uuid);
    found_count = 0;
    truth_begin();
    machine->lists++;
    if ((list == GRAPHICS && !d->graphics) || (list == MPS && !d->mps)) return;
    sim_reap(machine, own, h->device);
    for (uint32_t s = 0; s < machine->slot_high; s++) {
        const sim_usage *u = &machine->slot[s].usage[h->device];
        if (!u->contexts || (h->instance && u->instance != h->instance)) continue;
        int pid = sim_owner(machine, (int)s, own);
        if (pid <= 0) continue; /* dead, or in another pid namespace */
        uint32_t checkpointed = machine->slot[s].checkpointed;
        if (checkpointed == 1) continue;
        add((uint32_t)pid, checkpointed ? 0 : sim_listed(u), u->instance);
        if (truth) truth_put(machine, now, uuid, list_names[list], (uint32_t)pid, u, (int)s, h->device);
    }
    if (h->instance) return;
    /* Held bytes belong to no allocation: the journal counts them as the context's. */
    sim_usage other = {0};
    /* A driver is notified when a process ends. Polling is the cost of this simulation, so it is done rarely. */
    int check = now - machine->hold_reap_ns > 500000000;
    if (check) machine->hold_reap_ns = now;
    for (uint32_t i = 0; i < machine->hold_high; i++) {
        sim_hold *hold = &machine->hold[i];
        if (!hold->pid || (hold->device != (uint32_t)h->device && !check)) continue;
        if (check && kill((pid_t)hold->pid, 0) && errno == ESRCH && hold->pid < FIRST_GHOST) {
            hold->pid = 0;
            continue;
        }
        if (hold->device != (uint32_t)h->device) continue;
        add(hold->pid, hold->bytes, 0);
        other.context_bytes = hold->bytes;
        if (truth) truth_put(machine, now, uuid, list_names[list], hold->pid, &other, -1, h->device);
    }
    for (uint32_t i = 0; i < d->ghosts; i++) {
        uint32_t pid = FIRST_GHOST + (uint32_t)h->device * 100000 + i;
        add(pid, d->ghost_bytes, 0);
        other.context_bytes = d->ghost_bytes;
        if (truth) truth_put(machine, now, uuid, list_names[list], pid, &other, -1, h->device);
    }
}

/* Takes a list at one instant, half-way through the call. `give` copies it out. */
static nvmlReturn make_list(const handle *h, enum list list, int hide, uint32_t room, uint32_t *count,
                            void (*give)(void *out, uint32_t at, const entry *e), void *out) {
    uint64_t locked = machine->nvml_list_locks;
    if (!locked) sim_wait_us(machine, machine->nvml_list_us / 2);
    sim_lock(machine);
    if (locked) sim_wait_us(machine, machine->nvml_list_us);
    collect(h, list);
    uint32_t have = found_count, need = have;
    nvmlReturn result = OK;
    if (machine->nvml_race && sim_random(machine) % 100 < machine->nvml_race) need += 8;
    if (need > room) {
        *count = need;
        result = INSUFFICIENT_SIZE;
    } else {
        for (uint32_t i = 0; i < have; i++) {
            if (hide) found[i].bytes = NOT_AVAILABLE;
            give(out, i, &found[i]);
        }
        *count = have;
    }
    int garbage = room && fault_of(h, LANE_LIST) == SIM_GARBAGE;
    if (garbage) {
        /* Garbage: more records than the buffer holds, with impossible processes and amounts. */
        for (uint32_t i = 0; i < room; i++) {
            uint64_t noise = sim_random(machine) * 0x9e3779b97f4a7c15ull;
            uint32_t pids[] = {0, UINT32_MAX, FIRST_GHOST + (uint32_t)(noise % 16)};
            entry e = {pids[i % 3], i % 5 ? noise : NOT_AVAILABLE - i, (uint32_t)noise, (uint32_t)(noise >> 32)};
            give(out, i, &e);
        }
        *count = room * 4 + 1;
        result = OK;
    }
    /* The journal gets no line for a query of only the size, nor for a garbage result. */
    if (result == OK && !garbage) truth_write(machine);
    if (locked) sim_wait_us(machine, machine->nvml_list_per_process_us * have);
    sim_unlock(machine);
    if (!locked)
        sim_wait_us(machine, machine->nvml_list_us - machine->nvml_list_us / 2 +
                                 machine->nvml_list_per_process_us * have);
    return result;
}

typedef struct {
    uint32_t pid;
    uint64_t bytes;
} record_v1;
typedef struct {
    uint32_t pid;
    uint64_t bytes;
    uint32_t gi, ci;
} record_v2;
typedef struct {
    uint32_t pid;
    uint64_t bytes;
    uint32_t gi, ci;
    uint64_t protected;
} record_detail;
_Static_assert(sizeof(record_v1) == 16 && sizeof(record_v2) == 24 && sizeof(record_detail) == 32, "layouts");

static void give_v1(void *out, uint32_t at, const entry *e) { ((record_v1 *)out)[at] = (record_v1){e->pid, e->bytes}; }
static inline void give_v2(void *out, uint32_t at, const entry *e) {
    ((record_v2 *)out)[at] = (record_v2){e->pid, e->bytes, e->gi, e->ci};
}
static inline void give_detail(void *out, uint32_t at, const entry *e) {
    ((record_detail *)out)[at] = (record_detail){
        e->pid, e->bytes, e->gi, e->ci,
        e->bytes == NOT_AVAILABLE ? NOT_AVAILABLE : machine->nvml_cc ? e->bytes / 100 * machine->nvml_protected : 0};
}

#define LIST(name, list, give)                                                       \
    EXPORT nvmlReturn name(const handle *h, unsigned *count, void *out) {            \
        int hide = 0;                                                                \
        BEGIN_DEVICE(h, LANE_LIST, &hide);                                           \
        if (!count) return INVALID_ARGUMENT;                                         \
        return make_list(h, list, hide, out ? *count : 0, count, give, out);         \
    }
#define LISTS(suffix, give)                                                          \
    LIST(nvmlDeviceGetComputeRunningProcesses##suffix, COMPUTE, give)                \
    LIST(nvmlDeviceGetGraphicsRunningProcesses##suffix, GRAPHICS, give)              \
    LIST(nvmlDeviceGetMPSComputeRunningProcesses##suffix, MPS, give)

LISTS(, give_v1)
#if SIM_NVML != 1
LISTS(_v2, give_v2)
#endif
#if SIM_NVML == 535
LISTS(_v3, give_detail) /* the early 535 drivers: longer records under the same name */
#elif SIM_NVML == 3
LISTS(_v3, give_v2)

typedef struct {
    uint32_t version, mode, count;
    record_detail *out;
} detail_list;
_Static_assert(sizeof(detail_list) == 24, "nvmlProcessDetailList_v1");
EXPORT nvmlReturn nvmlDeviceGetRunningProcessDetailList(const handle *h, detail_list *list) {
    int hide = 0;
    BEGIN_DEVICE(h, LANE_LIST, &hide);
    if (!list || list->mode > MPS) return INVALID_ARGUMENT;
    if (list->version != 0x01000018) return ARGUMENT_VERSION;
    return make_list(h, (enum list)list->mode, hide, list->out ? list->count : 0, &list->count, give_detail,
                     list->out);
}
#endif
