/* Mapping, lock, slots and the machine's books. See machine.h. */
#include "machine.h"
#include "truth.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static sim_machine *mapped;
static int mapped_fd = -1;
static pthread_mutex_t mapping = PTHREAD_MUTEX_INITIALIZER;

int sim_fd(void) { return mapped_fd; }

sim_machine *sim_open(const char *path) {
    pthread_mutex_lock(&mapping);
    if (!mapped) {
        if (!path) path = getenv("GPUMEM_SIM");
        int fd = path && *path ? open(path, O_RDWR | O_CLOEXEC) : -1;
        if (fd >= 0 && fd < 3) { /* a program without standard output writes to number 1 */
            int low = fd;
            fd = fcntl(low, F_DUPFD_CLOEXEC, 3);
            close(low);
        }
        sim_machine *m = fd < 0 ? MAP_FAILED
                                : mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (m != MAP_FAILED && lseek(fd, 0, SEEK_END) == (off_t)sizeof *m && m->magic == SIM_MAGIC &&
            m->bytes == sizeof *m) {
            mapped = m;
            mapped_fd = fd;
        } else {
            if (m != MAP_FAILED) munmap(m, sizeof *m);
            if (fd >= 0) close(fd); /* holds no lock of ours: not a machine */
        }
    }
    pthread_mutex_unlock(&mapping);
    return mapped;
}

sim_machine *sim_create(const char *path) {
    char temporary[4096];
    snprintf(temporary, sizeof temporary, "%s.new", path);
    int fd = open(temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || ftruncate(fd, sizeof(sim_machine))) return NULL;
    fchmod(fd, 0666);
    sim_machine *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (m == MAP_FAILED) return NULL;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&m->lock, &attributes);
    m->bytes = sizeof *m;
    sim_defaults(m);
    m->magic = SIM_MAGIC;
    mapped = m;
    mapped_fd = fd;
    if (rename(temporary, path)) return NULL;
    return m;
}

static void recount(sim_machine *m) {
    for (int d = 0; d < SIM_DEVICES; d++) {
        m->device[d].charged_bytes = 0;
        for (uint32_t s = 0; s < m->slot_high; s++) {
            const sim_usage *u = &m->slot[s].usage[d];
            m->device[d].charged_bytes += sim_used(u) + u->managed_resident_bytes;
        }
    }
}

static _Thread_local int frozen; /* by sim_freeze: what happens meanwhile is one change */

void sim_lock(sim_machine *m) {
    if (frozen) return;
    if (pthread_mutex_lock(&m->lock) == EOWNERDEAD) {
        /* The owner died between two sums; its slot goes with it, the totals are made anew. */
        recount(m);
        pthread_mutex_consistent(&m->lock);
    }
}

void sim_unlock(sim_machine *m) {
    if (!frozen) pthread_mutex_unlock(&m->lock);
}

void sim_freeze(sim_machine *m, int on) {
    if (on) sim_lock(m);
    frozen = on;
    if (!on) sim_unlock(m);
}

uint64_t sim_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

void sim_wait_us(const sim_machine *m, uint64_t us) {
    if (!us) return;
    if (m->latency_sleep) {
        struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
        nanosleep(&t, NULL);
        return;
    }
    uint64_t end = sim_now_ns() + us * 1000;
    while (sim_now_ns() < end) {}
}

static short lock_byte(int byte, short type, pid_t *pid) {
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    if (fcntl(mapped_fd, pid ? F_GETLK : F_SETLK, &l)) return -1;
    if (pid) *pid = l.l_pid;
    return l.l_type;
}

/* Field 22 of /proc/self/stat; asked for once in each process. */
static uint64_t own_ticks(void) {
    static pid_t of;
    static uint64_t ticks;
    if (of == getpid()) return ticks;
    char text[1024] = "";
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) close(fd);
    const char *at = length > 0 ? strrchr(text, ')') : NULL;
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    ticks = at ? strtoull(at, NULL, 10) : 0;
    of = getpid();
    return ticks;
}

int sim_owner(sim_machine *m, int slot, int own) {
    if (m->slot[slot].state == 0) return -1;
    if (slot == own) return getpid();
    pid_t pid = 0;
    short type = lock_byte(slot, F_WRLCK, &pid);
    if (type == F_UNLCK) {
        int ours = own == SIM_ASK && m->slot[slot].pid == getpid() && m->slot[slot].start_ticks == own_ticks();
        return ours ? getpid() : -1;
    }
    return pid > 0 ? pid : 0;
}

/* Reports the memory of an ended process under the pid in its own namespace, which cannot be queried any more. */
static void tell_end(sim_machine *m, int slot) {
    if (!truth_wanted(m)) return;
    const sim_slot *s = &m->slot[slot];
    uint64_t now = sim_now_ns();
    truth_begin();
    for (uint64_t d = 0; d < m->device_count; d++) {
        char uuid[48];
        sim_uuid_text(m->device[d].uuid, "GPU-", uuid);
        if (s->usage[d].contexts) truth_put(m, now, uuid, "end", (uint32_t)s->pid, &s->usage[d], slot, (int)d);
    }
    truth_write(m);
}

static void clear_slot(sim_machine *m, int slot) {
    sim_slot *s = &m->slot[slot];
    tell_end(m, slot);
    for (int d = 0; d < SIM_DEVICES; d++) {
        sim_usage *u = &s->usage[d];
        if (u->max_used_bytes) {
            m->dead[m->dead_head++ % SIM_DEAD] = (sim_dead){(uint32_t)s->pid, (uint32_t)d, u->max_used_bytes,
                                                            s->start_ns / 1000, (sim_now_ns() - s->start_ns) / 1000000};
            memset(m->tags[slot].bytes[d], 0, s->tag_count * sizeof(int64_t));
        }
        uint64_t bytes = sim_used(u) + u->managed_resident_bytes;
        m->device[d].charged_bytes -= bytes < m->device[d].charged_bytes ? bytes : m->device[d].charged_bytes;
    }
    memset(s, 0, sizeof *s);
}

void sim_reap(sim_machine *m, int own, int device) {
    for (uint32_t s = 0; s < m->slot_high; s++) {
        if (m->slot[s].state == 0) continue;
        if (device >= 0 && m->slot[s].usage[device].max_used_bytes == 0) continue;
        if (sim_owner(m, (int)s, own) == -1) clear_slot(m, (int)s);
    }
}

int sim_claim(sim_machine *m) {
    sim_reap(m, SIM_NO_SLOT, -1);
    for (int s = 0; s < SIM_SLOTS; s++) {
        if (m->slot[s].state || lock_byte(s, F_WRLCK, NULL) != F_WRLCK) continue;
        m->slot[s].state = 1;
        m->slot[s].pid = getpid();
        m->slot[s].uid = getuid();
        m->slot[s].start_ticks = own_ticks();
        m->slot[s].start_ns = sim_now_ns();
        m->slot[s].tag_count = 1;
        if (m->slot_high <= (uint32_t)s) m->slot_high = (uint32_t)s + 1;
        return s;
    }
    return -1;
}

uint64_t sim_listed(const sim_usage *u) { return sim_used(u) + u->import_charged_bytes; }
uint64_t sim_used(const sim_usage *u) {
    return u->context_bytes + u->module_bytes + u->local_bytes + u->heaps_bytes + u->internal_bytes + u->other_bytes +
           u->rounding_bytes + u->tracked_bytes;
}

static uint64_t held(sim_machine *m, int device) {
    uint64_t bytes = 0;
    for (uint32_t h = 0; h < m->hold_high; h++)
        if (m->hold[h].pid && m->hold[h].device == (uint32_t)device) bytes += m->hold[h].bytes;
    return bytes;
}

uint64_t sim_device_used(sim_machine *m, int device) {
    const sim_device *d = &m->device[device];
    return d->charged_bytes + d->ghosts * d->ghost_bytes + held(m, device) + d->unaccounted_bytes;
}

uint64_t sim_instance_used(sim_machine *m, int device, uint32_t instance) {
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < m->slot_high; s++) {
        const sim_usage *u = &m->slot[s].usage[device];
        if (u->instance == instance) bytes += sim_used(u) + u->managed_resident_bytes;
    }
    return bytes;
}

/* Equal slices, of a whole number of granules. */
uint64_t sim_instance_bytes(const sim_machine *m, int device) {
    const sim_device *d = &m->device[device];
    uint64_t slices = d->mig ? d->mig : 1;
    return (d->memory_bytes - d->reserved_bytes) / slices / m->cost.granule * m->cost.granule;
}

static int fits(sim_machine *m, int slot, int device, uint64_t bytes) {
    const sim_device *d = &m->device[device];
    uint32_t instance = m->slot[slot].usage[device].instance;
    if (instance) return sim_instance_used(m, device, instance) + bytes <= sim_instance_bytes(m, device);
    return sim_device_used(m, device) + bytes <= d->memory_bytes - d->reserved_bytes;
}

int sim_charge(sim_machine *m, int slot, int device, uint64_t bytes) {
    if (bytes > m->device[device].memory_bytes) return -1;
    if (!fits(m, slot, device, bytes)) {
        sim_reap(m, slot, device);
        if (!fits(m, slot, device, bytes)) return -1;
    }
    m->device[device].charged_bytes += bytes;
    sim_usage *u = &m->slot[slot].usage[device];
    /* Before the caller counts the bytes: the high-water mark, which accounting reports and reaping uses. */
    uint64_t used = sim_used(u) + bytes;
    if (used > u->max_used_bytes) u->max_used_bytes = used;
    return 0;
}

void sim_discharge(sim_machine *m, int slot, int device, uint64_t bytes) {
    (void)slot;
    m->device[device].charged_bytes -= bytes;
}

uint64_t sim_random(sim_machine *m) {
    m->random = m->random * 6364136223846793005ull + 1442695040888963407ull;
    return m->random >> 33;
}

int sim_counter(sim_machine *m, const char *name) {
    for (uint32_t i = 0; i < m->call_count; i++)
        if (!strcmp(m->call[i].name, name)) return (int)i;
    if (m->call_count == SIM_CALLS) return SIM_CALLS - 1;
    snprintf(m->call[m->call_count].name, sizeof m->call[0].name, "%s", name);
    return (int)m->call_count++;
}

void sim_mig_uuid(const sim_machine *m, int device, uint32_t instance, uint8_t uuid[16]) {
    memcpy(uuid, m->device[device].uuid, 16);
    uuid[0] ^= 0xff;
    uuid[14] = (uint8_t)instance;
}

void sim_uuid_text(const uint8_t u[16], const char *prefix, char out[48]) {
    snprintf(out, 48, "%s%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}
