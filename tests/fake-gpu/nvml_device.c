/* Devices: identity, memory, MIG, accounting. */
#include "nvml_internal.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

EXPORT nvmlReturn nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN();
    if (!count) return INVALID_ARGUMENT;
    *count = (unsigned)machine->device_count;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

static nvmlReturn handed(handle *h, handle **out) {
    if (!out) return INVALID_ARGUMENT;
    if (machine->device[h->device].fault == SIM_LOST) return GPU_IS_LOST;
    *out = h;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetHandleByIndex_v2(unsigned index, handle **out) {
    BEGIN();
    return index < machine->device_count ? handed(&handles[index][0], out) : INVALID_ARGUMENT;
}
EXPORT nvmlReturn nvmlDeviceGetHandleByIndex(unsigned index, handle **out) {
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

static void uuid_text(const handle *h, char out[48]) {
    uint8_t uuid[16];
    if (!h->instance) {
        sim_uuid_text(machine->device[h->device].uuid, "GPU-", out);
        return;
    }
    sim_mig_uuid(machine, h->device, h->instance, uuid);
    sim_uuid_text(uuid, "MIG-", out);
}
EXPORT nvmlReturn nvmlDeviceGetHandleByUUID(const char *uuid, handle **out) {
    BEGIN();
    if (!uuid) return INVALID_ARGUMENT;
    char text[48];
    for (int d = 0; d < (int)machine->device_count; d++)
        for (uint32_t i = 0; i <= machine->device[d].mig && i < 8; i++) {
            uuid_text(&handles[d][i], text);
            if (!strcasecmp(text, uuid)) return handed(&handles[d][i], out);
        }
    return NOT_FOUND;
}
EXPORT nvmlReturn nvmlDeviceGetUUID(const handle *h, char *out, unsigned room) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    while (*(volatile uint64_t *)&machine->device[h->device].fault_open == SIM_HANG) {
        struct timespec t = {0, 2000000};
        nanosleep(&t, NULL);
    }
    char text[48];
    uuid_text(h, text);
    if (room <= strlen(text)) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetName(const handle *h, char *out, unsigned room) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    const sim_device *d = &machine->device[h->device];
    char name[160];
    if (h->instance)
        snprintf(name, sizeof name, "%s MIG 1g.%llugb", d->name,
                 (unsigned long long)(sim_instance_bytes(machine, h->device) >> 30));
    else
        snprintf(name, sizeof name, "%s", d->name);
    if (room <= strlen(name)) return INSUFFICIENT_SIZE;
    strcpy(out, name);
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetIndex(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = (unsigned)h->device;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetNumaNodeId(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!machine->device[h->device].numa_node) return NOT_SUPPORTED;
    *out = (unsigned)machine->device[h->device].numa_node;
    return OK;
}
#if SIM_NVML == 3
typedef struct {
    unsigned version, mode;
} addressing_mode;
EXPORT nvmlReturn nvmlDeviceGetAddressingMode(const handle *h, addressing_mode *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!out) return INVALID_ARGUMENT;
    if (out->version != 0x01000008) return ARGUMENT_VERSION;
    out->mode = (unsigned)machine->device[h->device].addressing;
    return OK;
}
static int is_in_group(int pid, const char *group) {
    char path[64], line[4096];
    snprintf(path, sizeof path, "/proc/%d/cgroup", pid);
    FILE *file = fopen(path, "re");
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *of = strchr(line, ':');
        of = of ? strchr(of + 1, ':') : NULL;
        found = of && !strcmp(of + 1, group);
    }
    if (file) fclose(file);
    return found;
}
typedef struct {
    const char *group;
    uint64_t soft, hard, used;
} memory_limits;
EXPORT nvmlReturn nvmlDeviceGetMemoryLimits_v1(const handle *h, memory_limits *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!out || !out->group) return INVALID_ARGUMENT;
    uint64_t limit = machine->device[h->device].memory_limit;
    if (!limit) return NOT_SUPPORTED;
    out->hard = limit;
    out->soft = limit / 2;
    out->used = 0;
    for (uint32_t s = 0; s < machine->slot_high; s++) {
        int pid = sim_owner(machine, (int)s, SIM_ASK);
        if (pid > 0 && is_in_group(pid, out->group)) out->used += sim_used(&machine->slot[s].usage[h->device]);
    }
    return OK;
}
#endif
EXPORT nvmlReturn nvmlDeviceGetUtilizationRates(const handle *h, unsigned out[2]) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    const sim_device *d = &machine->device[h->device];
    if (h->instance || !(d->utilization || d->power)) return NOT_SUPPORTED;
    out[0] = (unsigned)d->utilization;
    out[1] = 13; /* of memory transfers, which is no share of the memory in use */
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetPowerUsage(const handle *h, unsigned *milliwatts) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!machine->device[h->device].power) return NOT_SUPPORTED;
    *milliwatts = (unsigned)machine->device[h->device].power * 1000;
    return OK;
}
static nvmlReturn display(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = machine->device[h->device].display != 0;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetDisplayActive(const handle *h, unsigned *out) { return display(h, out); }
EXPORT nvmlReturn nvmlDeviceGetDisplayMode(const handle *h, unsigned *out) { return display(h, out); }
/* Windows' driver models: 0 WDDM. Linux has none. */
static nvmlReturn driver_model(const handle *h, unsigned *now, unsigned *pending) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!machine->nvml_wsl) return NOT_SUPPORTED;
    *now = *pending = 0;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetDriverModel_v2(const handle *h, unsigned *now, unsigned *pending) {
    return driver_model(h, now, pending);
}
EXPORT nvmlReturn nvmlDeviceGetDriverModel(const handle *h, unsigned *now, unsigned *pending) {
    return driver_model(h, now, pending);
}
/* Reply of a Hopper GPU outside any fabric: PyTorch 2.13 queries it before it maps memory. */
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state; /* 0: not supported */
    unsigned health;
} fabric_info;
EXPORT nvmlReturn nvmlDeviceGetGpuFabricInfoV(const handle *h, fabric_info *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    unsigned version = out->version;
    memset(out, 0, sizeof *out);
    out->version = version;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetMinorNumber(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = (unsigned)h->device;
    return OK;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char text[32];
} pci_info;
EXPORT nvmlReturn nvmlDeviceGetPciInfo_v3(const handle *h, pci_info *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)h->device + 1;
    out->device_id = 0x233010de;
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus & 0xff);
    snprintf(out->text, sizeof out->text, "00000000:%02X:00.0", out->bus & 0xff);
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetPciInfo_v2(const handle *h, pci_info *out) { return nvmlDeviceGetPciInfo_v3(h, out); }
EXPORT nvmlReturn nvmlDeviceGetPciInfo(const handle *h, pci_info *out) { return nvmlDeviceGetPciInfo_v3(h, out); }

/* With or without leading zeros of the domain, as the CUDA driver writes it. */
EXPORT nvmlReturn nvmlDeviceGetHandleByPciBusId_v2(const char *id, handle **out) {
    BEGIN();
    unsigned domain, bus;
    if (!id || sscanf(id, "%x:%x:", &domain, &bus) != 2) return INVALID_ARGUMENT;
    if (domain || !bus || bus > machine->device_count) return NOT_FOUND;
    return handed(&handles[bus - 1][0], out);
}

/* ---- memory ---- */

typedef struct {
    uint64_t total, reserved, used, free;
} memory;

/* The whole device: total = reserved + used + free. An instance has no share of the driver's. */
static memory read_memory(const handle *h) {
    const sim_device *d = &machine->device[h->device];
    sim_wait_us(machine, machine->nvml_memory_us / 2);
    sim_lock(machine);
    sim_reap(machine, SIM_ASK, h->device);
    memory m = {d->memory_bytes, d->reserved_bytes, 0, 0};
    if (h->instance) {
        m.total = sim_instance_bytes(machine, h->device);
        m.reserved = 0;
        m.used = sim_instance_used(machine, h->device, h->instance);
    } else {
        m.used = sim_device_used(machine, h->device);
    }
    sim_unlock(machine);
    sim_wait_us(machine, machine->nvml_memory_us - machine->nvml_memory_us / 2);
    m.free = m.reserved + m.used < m.total ? m.total - m.reserved - m.used : 0;
    if (fault_of(h, LANE_MEMORY) == SIM_GARBAGE)
        m = (memory){m.total, UINT64_MAX - 7, UINT64_MAX / 2, UINT64_MAX - sim_random(machine) % 99};
    return m;
}
typedef struct {
    uint64_t total, free, used;
} memory_v1;
EXPORT nvmlReturn nvmlDeviceGetMemoryInfo(const handle *h, memory_v1 *out) {
    BEGIN_DEVICE(h, LANE_MEMORY, NULL);
    if (machine->device[h->device].unified) return NOT_SUPPORTED;
    if (!out) return INVALID_ARGUMENT;
    memory m = read_memory(h);
    *out = (memory_v1){m.total, m.free, m.total - m.free};
    return OK;
}
#if SIM_NVML == 3 || SIM_NVML == 535
typedef struct {
    uint32_t version;
    uint64_t total, reserved, free, used;
} memory_v2;
_Static_assert(sizeof(memory_v2) == 40, "nvmlMemory_v2");
EXPORT nvmlReturn nvmlDeviceGetMemoryInfo_v2(const handle *h, memory_v2 *out) {
    BEGIN_DEVICE(h, LANE_MEMORY, NULL);
    if (machine->device[h->device].unified) return NOT_SUPPORTED;
    if (!out) return INVALID_ARGUMENT;
    if (out->version != 0x02000028) return ARGUMENT_VERSION;
    memory m = read_memory(h);
    out->total = m.total;
    out->reserved = m.reserved;
    out->free = m.free;
    out->used = m.used;
    return OK;
}
typedef struct {
    uint64_t protected_kib, unprotected_kib;
} conf_sizes;
EXPORT nvmlReturn nvmlDeviceGetConfComputeMemSizeInfo(const handle *h, conf_sizes *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = (conf_sizes){0, machine->device[h->device].memory_bytes >> 10};
    return OK;
}
#endif
EXPORT nvmlReturn nvmlDeviceGetBAR1MemoryInfo(const handle *h, memory_v1 *out) {
    BEGIN_DEVICE(h, LANE_MEMORY, NULL);
    if (!out) return INVALID_ARGUMENT;
    *out = (memory_v1){128ull << 30, (128ull << 30) - (6ull << 20), 6ull << 20};
    return OK;
}

/* ---- MIG: instance i is GPU instance i, at a sparse index when there is room for holes ---- */

static uint32_t instance_at(const handle *h, unsigned index) {
    uint64_t count = machine->device[h->device].mig;
    if (count > 3) return index < count ? index + 1 : 0;
    return index % 2 == 0 && index / 2 < count ? index / 2 + 1 : 0;
}
EXPORT nvmlReturn nvmlDeviceGetMigMode(const handle *h, unsigned *now, unsigned *pending) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (h->instance) return INVALID_ARGUMENT;
    *now = *pending = machine->device[h->device].mig > 0;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetMaxMigDeviceCount(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = 7;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetMigDeviceHandleByIndex(const handle *h, unsigned index, handle **out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (h->instance || index >= 7) return INVALID_ARGUMENT;
    uint32_t instance = instance_at(h, index);
    if (machine->device[h->device].mig_hidden) instance = 0;
    return instance ? handed(&handles[h->device][instance], out) : NOT_FOUND;
}
EXPORT nvmlReturn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const handle *h, handle **out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    return h->instance ? handed(&handles[h->device][0], out) : INVALID_ARGUMENT;
}
EXPORT nvmlReturn nvmlDeviceIsMigDeviceHandle(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = h->instance != 0;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetGpuInstanceId(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!h->instance) return NOT_SUPPORTED;
    *out = h->instance;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetComputeInstanceId(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!h->instance) return NOT_SUPPORTED;
    *out = 0;
    return OK;
}

/* ---- accounting ---- */

typedef struct {
    unsigned gpu_percent, memory_percent;
    uint64_t max_bytes, time_ms, start_us;
    unsigned running, reserved[5];
} accounting_stats;
_Static_assert(sizeof(accounting_stats) == 56, "nvmlAccountingStats");

EXPORT nvmlReturn nvmlDeviceGetAccountingMode(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = machine->device[h->device].accounting != 0;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceSetAccountingMode(const handle *h, unsigned mode) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (geteuid()) return NO_PERMISSION;
    machine->device[h->device].accounting = mode;
    return OK;
}
EXPORT nvmlReturn nvmlDeviceGetAccountingBufferSize(const handle *h, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    *out = SIM_SLOTS + SIM_DEAD;
    return OK;
}
/* Calls `each` for the living, then for the dead; stops when it answers non-zero. */
static int each_account(int device, int (*each)(const sim_dead *one, int running, void *to), void *to) {
    int own = SIM_ASK, done = 0;
    sim_reap(machine, own, device);
    for (uint32_t s = 0; s < machine->slot_high && !done; s++) {
        const sim_usage *u = &machine->slot[s].usage[device];
        int pid = u->max_used_bytes ? sim_owner(machine, (int)s, own) : 0;
        if (pid <= 0) continue;
        sim_dead one = {(uint32_t)pid, (uint32_t)device, u->max_used_bytes, machine->slot[s].start_ns / 1000, 0};
        done = each(&one, 1, to);
    }
    for (uint32_t i = 0; i < machine->dead_head && i < SIM_DEAD && !done; i++)
        if (machine->dead[i].device == (uint32_t)device) done = each(&machine->dead[i], 0, to);
    return done;
}
struct pids {
    unsigned room, count, *out;
};
static int add_pid(const sim_dead *one, int running, void *to) {
    struct pids *p = to;
    (void)running;
    if (p->count < p->room) p->out[p->count] = one->pid;
    p->count++;
    return 0;
}
EXPORT nvmlReturn nvmlDeviceGetAccountingPids(const handle *h, unsigned *count, unsigned *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!machine->device[h->device].accounting) return NOT_SUPPORTED;
    struct pids p = {out ? *count : 0, 0, out};
    sim_lock(machine);
    each_account(h->device, add_pid, &p);
    sim_unlock(machine);
    *count = p.count;
    return p.count > p.room ? INSUFFICIENT_SIZE : OK;
}
struct stats {
    unsigned pid;
    accounting_stats *out;
};
static int find_stats(const sim_dead *one, int running, void *to) {
    const struct stats *s = to;
    if (one->pid != s->pid) return 0;
    uint64_t most = one->max_used_bytes + machine->device[one->device].accounting_extra;
    *s->out = (accounting_stats){0, 0, most, one->time_ms, one->start_us, (unsigned)running, {0}};
    return 1;
}
EXPORT nvmlReturn nvmlDeviceGetAccountingStats(const handle *h, unsigned pid, accounting_stats *out) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (!machine->device[h->device].accounting) return NOT_SUPPORTED;
    struct stats s = {pid, out};
    sim_lock(machine);
    int found = each_account(h->device, find_stats, &s);
    sim_unlock(machine);
    return found ? OK : NOT_FOUND;
}
EXPORT nvmlReturn nvmlDeviceClearAccountingPids(const handle *h) {
    BEGIN_DEVICE(h, LANE_OTHER, NULL);
    if (geteuid()) return NO_PERMISSION;
    sim_lock(machine);
    for (int i = 0; i < SIM_DEAD; i++)
        if (machine->dead[i].device == (uint32_t)h->device) machine->dead[i].device = SIM_DEVICES;
    sim_unlock(machine);
    return OK;
}
