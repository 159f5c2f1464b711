/* fake-gpu: makes, changes and shows a simulated machine. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fcntl.h>

#include "machine.h"

static int usage_text(FILE *out) {
    fprintf(out, "fake-gpu init FILE [costs=TABLE] [KEY=VALUE...]   makes a machine (then: export GPUMEM_SIM=FILE)\n"
                 "fake-gpu set FILE KEY=VALUE...           changes it while it runs\n"
                 "fake-gpu show FILE                       devices, processes, NVML calls\n"
                 "fake-gpu hold FILE PID DEVICE BYTES      a process that holds bytes (0: no more); any pid\n"
                 "fake-gpu grow FILE PID DEVICE BYTES      growth that no call explains; may be negative\n"
                 "fake-gpu checkpoint FILE PID HOW         its memory is on the host: no list has it (1), or with 0 bytes (2); 0: back\n"
                 "fake-gpu xid FILE DEVICE CODE            an Xid event\n"
                 "fake-gpu event FILE DEVICE TYPE DATA     any NVML event\n"
                 "fake-gpu unbind FILE ID                  the driver is being unbound from the GPU with this id: a system event\n"
                 "fake-gpu used FILE PID DEVICE            what a process holds, in bytes\n"
                 "fake-gpu keys\n"
                 "A key of one device is written gpuN.KEY; KEY alone is for all. Bytes take K, M, G. TABLE: costs of calls, as\n"
                 "tests/gpu measures them; keys go over it.\n");
    return out == stdout ? 0 : 2;
}

static int keys(void) {
    int count;
    const sim_key *all = sim_keys(&count);
    for (int k = 0; k < count; k++)
        printf("%-28s %s%s%s%s%s\n", all[k].name, all[k].per_device ? "(device) " : "", all[k].help,
               all[k].values ? ": " : "", all[k].values ? all[k].values : "", all[k].kind == 'f' ? "|code:N" : "");
    return 0;
}

static int set_all(sim_machine *m, int count, char **words) {
    for (int i = 0; i < count; i++) {
        const char *why = sim_set(m, words[i]);
        if (why) {
            fprintf(stderr, "fake-gpu: %s: %s\n", words[i], why);
            return 2;
        }
    }
    return 0;
}

/* Applies costs=TABLE before all keys, and removes it from the words. */
static int take_costs(sim_machine *m, int *count, char **words) {
    int keep = 0;
    for (int i = 0; i < *count; i++) {
        static char text[65536];
        if (strncmp(words[i], "costs=", 6)) {
            words[keep++] = words[i];
            continue;
        }
        FILE *file = fopen(words[i] + 6, "r");
        size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
        int line = 0;
        const char *why = !file ? strerror(errno) : length == sizeof text - 1 ? "too long" : NULL;
        text[length] = 0;
        if (file) fclose(file);
        if (!why) why = sim_costs_of(m, text, &line);
        if (why) {
            fprintf(stderr, "fake-gpu: %s:%d: %s\n", words[i] + 6, line, why);
            return 2;
        }
    }
    *count = keep;
    return 0;
}

static int show(sim_machine *m) {
    int count;
    const sim_key *all = sim_keys(&count);
    char text[600], uuid[48];
    sim_reap(m, SIM_NO_SLOT, -1);
    for (int k = 0; k < count; k++)
        if (!all[k].per_device) {
            sim_print_key(m, &all[k], 0, text, sizeof text);
            printf("%s=%s\n", all[k].name, text);
        }
    for (int d = 0; d < (int)m->device_count; d++) {
        sim_uuid_text(m->device[d].uuid, "GPU-", uuid);
        printf("gpu%d.uuid=%s\n", d, uuid);
        for (int k = 0; k < count; k++)
            if (all[k].per_device) {
                sim_print_key(m, &all[k], d, text, sizeof text);
                printf("gpu%d.%s=%s\n", d, all[k].name, text);
            }
        printf("gpu%d.used=%llu\n", d, (unsigned long long)sim_device_used(m, d));
    }
    for (uint32_t s = 0; s < m->slot_high; s++)
        for (int d = 0; m->slot[s].state && d < (int)m->device_count; d++) {
            const sim_usage *u = &m->slot[s].usage[d];
            if (!u->contexts && !sim_used(u)) continue;
            printf("process pid=%d device=%d used=%llu context=%llu modules=%llu local=%llu heaps=%llu other=%llu rounding=%llu "
                   "tracked=%llu idle=%llu managed=%llu pinned=%llu imported=%llu instance=%u\n",
                   sim_owner(m, (int)s, SIM_NO_SLOT), d, (unsigned long long)sim_used(u), (unsigned long long)u->context_bytes,
                   (unsigned long long)u->module_bytes, (unsigned long long)u->local_bytes,
                   (unsigned long long)u->heaps_bytes, (unsigned long long)(u->internal_bytes + u->other_bytes), (unsigned long long)u->rounding_bytes,
                   (unsigned long long)u->tracked_bytes, (unsigned long long)u->idle_bytes,
                   (unsigned long long)u->managed_bytes, (unsigned long long)u->pinned_bytes,
                   (unsigned long long)u->imported_bytes, u->instance);
        }
    for (uint32_t h = 0; h < m->hold_high; h++)
        if (m->hold[h].pid)
            printf("hold pid=%u device=%u used=%llu\n", m->hold[h].pid, m->hold[h].device,
                   (unsigned long long)m->hold[h].bytes);
    int clients = 0;
    for (int c = 0; c < SIM_CLIENTS; c++) {
        struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SIM_SLOTS + c, .l_len = 1};
        clients += !fcntl(sim_fd(), F_GETLK, &l) && l.l_type != F_UNLCK;
    }
    printf("nvml.clients=%d\nlists=%llu\nstrays=%llu\nviolations=%llu\ndevice_counts=%llu\n", clients, (unsigned long long)m->lists,
           (unsigned long long)m->strays, (unsigned long long)m->violations, (unsigned long long)m->device_counts);
    for (uint32_t c = 0; c < m->call_count; c++)
        if (m->call[c].count) printf("call %s %llu\n", m->call[c].name, (unsigned long long)m->call[c].count);
    return 0;
}

static int hold(sim_machine *m, uint32_t pid, uint32_t device, uint64_t bytes) {
    int free = -1;
    if (!pid || device >= m->device_count) return 2;
    for (uint32_t h = 0; h < m->hold_high; h++) {
        if (m->hold[h].pid == pid && m->hold[h].device == device) {
            m->hold[h].bytes = bytes;
            if (!bytes) m->hold[h].pid = 0;
            return 0;
        }
        if (!m->hold[h].pid && free < 0) free = (int)h;
    }
    if (!bytes) return 0;
    if (free < 0 && m->hold_high == SIM_HOLDS) return 1;
    if (free < 0) free = (int)m->hold_high++;
    m->hold[free] = (sim_hold){pid, device, bytes};
    return 0;
}

static int slot_of(sim_machine *m, int pid) {
    for (uint32_t s = 0; s < m->slot_high; s++)
        if (m->slot[s].state && sim_owner(m, (int)s, SIM_NO_SLOT) == pid) return (int)s;
    fprintf(stderr, "fake-gpu: no process %d\n", pid);
    return -1;
}

static int grow(sim_machine *m, int pid, int device, int64_t bytes) {
    int s = slot_of(m, pid);
    if (s < 0) return 1;
    sim_usage *u = &m->slot[s].usage[device];
    if (bytes < 0) {
        uint64_t less = (uint64_t)-bytes < u->other_bytes ? (uint64_t)-bytes : u->other_bytes;
        sim_discharge(m, s, device, less);
        u->other_bytes -= less;
        return 0;
    }
    if (sim_charge(m, s, device, (uint64_t)bytes)) return 1;
    u->other_bytes += (uint64_t)bytes;
    return 0;
}

static int event(sim_machine *m, uint32_t device, uint64_t type, uint64_t data) {
    m->event[m->event_head % SIM_EVENTS] = (sim_event){device, 0, type, data};
    __atomic_store_n(&m->event_head, m->event_head + 1, __ATOMIC_RELEASE);
    __atomic_store_n(&m->event_word, m->event_head, __ATOMIC_RELEASE);
    syscall(SYS_futex, &m->event_word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return 0;
}

static int run(sim_machine *m, const char *what, int count, char **words) {
    uint64_t number[4] = {0};
    if (!strcmp(what, "set")) return set_all(m, count, words);
    if (!strcmp(what, "show")) return show(m);
    for (int i = 0; i < count && i < 4; i++) {
        int negative = words[i][0] == '-';
        if (sim_number(words[i] + negative, 1, &number[i])) {
            fprintf(stderr, "fake-gpu: %s is not a number; bytes take K, M, G\n", words[i]);
            return 2;
        }
        if (negative) number[i] = -number[i];
    }
    if (!strcmp(what, "hold") && count == 3) return hold(m, (uint32_t)number[0], (uint32_t)number[1], number[2]);
    if (count >= 2 && number[1] >= SIM_DEVICES && strcmp(what, "xid") && strcmp(what, "event")) return 2;
    if (!strcmp(what, "checkpoint") && count == 2) {
        int s = slot_of(m, (int)number[0]);
        if (s < 0) return 1;
        m->slot[s].checkpointed = (uint32_t)number[1];
        return 0;
    }
    if (!strcmp(what, "grow") && count == 3) return grow(m, (int)number[0], (int)number[1], (int64_t)number[2]);
    if (!strcmp(what, "xid") && count == 2) return event(m, (uint32_t)number[0], 8, number[1]);
    if (!strcmp(what, "event") && count == 3) return event(m, (uint32_t)number[0], number[1], number[2]);
    if (!strcmp(what, "unbind") && count == 1) return event(m, SIM_DEVICES, 1, number[0]);
    if (!strcmp(what, "used") && count == 2) {
        int s = slot_of(m, (int)number[0]);
        if (s < 0) return 1;
        printf("%llu\n", (unsigned long long)sim_used(&m->slot[s].usage[number[1]]));
        return 0;
    }
    return usage_text(stderr);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "keys")) return keys();
    if (argc == 2 && !strcmp(argv[1], "--help")) return usage_text(stdout);
    if (argc < 3) return usage_text(stderr);
    if (!strcmp(argv[1], "init")) {
        sim_machine *m = sim_create(argv[2]);
        if (!m) {
            fprintf(stderr, "fake-gpu: %s: %s\n", argv[2], strerror(errno));
            return 1;
        }
        int count = argc - 3;
        int result = take_costs(m, &count, argv + 3);
        if (!result) result = set_all(m, count, argv + 3);
        if (result) unlink(argv[2]);
        return result;
    }
    sim_machine *m = sim_open(argv[2]);
    if (!m) {
        fprintf(stderr, "fake-gpu: %s: not a machine\n", argv[2]);
        return 1;
    }
    sim_lock(m);
    int result = run(m, argv[1], argc - 3, argv + 3);
    sim_unlock(m);
    return result;
}
