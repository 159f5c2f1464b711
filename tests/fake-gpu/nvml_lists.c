/* Process lists, and the truth journal that is written with each. */
#include "nvml_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOT_AVAILABLE UINT64_MAX
#define FIRST_GHOST 5000000u /* above every pid that Linux gives */

typedef struct {
    uint32_t pid;
    uint64_t bytes;
    uint32_t gi, ci;
} entry;

enum list { COMPUTE, GRAPHICS, MPS };
static const char *const list_names[] = {"compute", "graphics", "mps"};

/* What a caller gets is collected here first; one list at a time, under the machine's lock. */
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

/* ---- truth ---- */

static char *line;
static size_t line_length, line_room;

__attribute__((format(printf, 1, 2))) static void put(const char *format, ...) {
    for (;;) {
        va_list arguments;
        va_start(arguments, format);
        int length = vsnprintf(line + line_length, line_room - line_length, format, arguments);
        va_end(arguments);
        if (line && length >= 0 && line_length + (size_t)length < line_room) {
            line_length += (size_t)length;
            return;
        }
        line_room = line_room ? line_room * 2 : 65536;
        line = realloc(line, line_room);
        if (!line) abort();
    }
}

static void put_text(const char *text) {
    put("\"");
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            put("\\%c", *text);
        else if ((unsigned char)*text < 32)
            put("\\u%04x", (unsigned)*text);
        else
            put("%c", *text);
    }
    put("\"");
}

static void put_process(uint64_t t, const char *device, enum list list, uint32_t pid, const sim_usage *u, int slot,
                        int d) {
    typedef unsigned long long llu;
    put("{\"t\":%llu,\"list\":%llu,\"call\":\"%s\",\"device\":\"%s\",\"pid\":%u,\"used\":%llu,\"context\":%llu,"
        "\"modules\":%llu,\"local\":%llu,\"other\":%llu,\"rounding\":%llu,\"tracked\":%llu,\"idle\":%llu,\"tags\":{",
        (llu)t, (llu)machine->lists, list_names[list], device, pid, (llu)sim_used(u), (llu)u->context_bytes,
        (llu)u->module_bytes, (llu)u->local_bytes, (llu)u->other_bytes, (llu)u->rounding_bytes,
        (llu)u->tracked_bytes, (llu)u->idle_bytes);
    const char *comma = "";
    for (uint32_t i = 0; slot >= 0 && i < machine->slot[slot].tag_count; i++) {
        int64_t bytes = machine->tags[slot].bytes[d][i];
        if (!bytes) continue;
        put("%s", comma);
        put_text(machine->tags[slot].name[i]);
        put(":%lld", (long long)bytes);
        comma = ",";
    }
    put("},\"beside\":{\"managed\":%llu,\"pinned\":%llu,\"imported\":%llu}}\n", (llu)u->managed_bytes,
        (llu)u->pinned_bytes, (llu)u->imported_bytes);
}

/* Opened once by name; another name opens another file. */
static void write_truth(void) {
    static char open_name[512];
    static int fd = -1;
    const char *name = getenv("GPUMEM_SIM_TRUTH");
    if (!name || !*name) name = machine->truth;
    if (fd < 0 || strcmp(name, open_name)) {
        if (fd >= 0) close(fd);
        snprintf(open_name, sizeof open_name, "%s", name);
        fd = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    }
    for (size_t done = 0; fd >= 0 && done < line_length;) {
        ssize_t n = write(fd, line + done, line_length - done);
        if (n < 0 && errno != EINTR) break;
        done += n > 0 ? (size_t)n : 0;
    }
}

static int wants_truth(void) {
    const char *name = getenv("GPUMEM_SIM_TRUTH");
    return (name && *name) || machine->truth[0];
}

/* ---- lists ---- */

static void collect(const handle *h, enum list list) {
    const sim_device *d = &machine->device[h->device];
    int own = SIM_ASK, truth = wants_truth();
    uint64_t now = sim_now_ns();
    char uuid[48];
    sim_uuid_text(d->uuid, "GPU-", uuid);
    found_count = 0;
    line_length = 0;
    machine->lists++;
    if ((list == GRAPHICS && !d->graphics) || (list == MPS && !d->mps)) return;
    sim_reap(machine, own, h->device);
    for (uint32_t s = 0; s < machine->slot_high; s++) {
        const sim_usage *u = &machine->slot[s].usage[h->device];
        if (!u->contexts || (h->instance && u->instance != h->instance)) continue;
        int pid = sim_owner(machine, (int)s, own);
        if (pid <= 0) continue; /* dead, or in another pid namespace */
        add((uint32_t)pid, sim_used(u), u->instance);
        if (truth) put_process(now, uuid, list, (uint32_t)pid, u, (int)s, h->device);
    }
    if (h->instance) return;
    /* Held bytes are no one's in particular: in the journal they are the context's. */
    sim_usage other = {0};
    int check = now - machine->hold_reap_ns > 20000000;
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
        if (truth) put_process(now, uuid, list, hold->pid, &other, -1, h->device);
    }
    for (uint32_t i = 0; i < d->ghosts; i++) {
        uint32_t pid = FIRST_GHOST + (uint32_t)h->device * 100000 + i;
        add(pid, d->ghost_bytes, 0);
        other.context_bytes = d->ghost_bytes;
        if (truth) put_process(now, uuid, list, pid, &other, -1, h->device);
    }
}

/* A list at one instant, half-way through the call. What is copied out is `give`'s business. */
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
    /* A query of the size alone reads no bytes: no line for it. */
    if (line_length && result == OK) write_truth();
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
    ((record_detail *)out)[at] = (record_detail){e->pid, e->bytes, e->gi, e->ci, 0};
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
