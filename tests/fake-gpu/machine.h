/* The simulated machine: one file that all its processes map (path: $GPUMEM_SIM).
 *
 * It holds the state that a kernel driver would know: devices, memory by process and device, faults. Addresses, streams
 * and pools belong to each process and live in its libcuda.
 *
 * One robust mutex guards everything. A process owns a slot and holds a POSIX record lock on the slot's byte of the
 * file. F_GETLK returns the owner's pid in the reader's own namespace. A slot without a lock belongs to a dead process,
 * whose memory is then reclaimed. The file is sparse. */
#ifndef SIM_MACHINE_H
#define SIM_MACHINE_H

#include <pthread.h>
#include <stdint.h>

#define SIM_MAGIC 0x32304d4953555047ull
#define SIM_DEVICES 16
#define SIM_SLOTS 256
#define SIM_TAGS 2048
#define SIM_TAG_BYTES 256
#define SIM_HOLDS 4096
#define SIM_CALLS 128
#define SIM_EVENTS 64
#define SIM_DEAD 128
#define SIM_CLIENTS 64 /* NVML clients: lock bytes behind those of the slots */

enum sim_fault {
    SIM_NONE,
    SIM_LOST,
    SIM_HANG,
    SIM_NO_PERMISSION,
    SIM_BYTES_UNAVAILABLE,
    SIM_NOT_SUPPORTED,
    SIM_UNKNOWN,
    SIM_RESET_REQUIRED,
    SIM_TIMEOUT,
    SIM_CRASH,
    SIM_GARBAGE,
};
#define SIM_CODE 0x10000u /* a fault or a driver that gives any NVML code: this and the code */
enum sim_driver { SIM_DRIVER_OK, SIM_DRIVER_ABSENT, SIM_DRIVER_MISMATCH };

/* Memory of one process on one device. `used` is the sum of the first eight fields. */
typedef struct {
    uint64_t context_bytes;  /* bases of the contexts */
    uint64_t module_bytes;   /* loaded code and globals, rounded up to the granule per context */
    uint64_t local_bytes;    /* thread stacks above the default limit */
    uint64_t heaps_bytes;    /* printf FIFO and malloc heap above their default limits */
    uint64_t internal_bytes; /* streams, events, executable graphs, peers: what the driver keeps for itself */
    uint64_t other_bytes;    /* growth that no call explains (`fake-gpu grow`) */
    uint64_t rounding_bytes; /* granule minus what was asked for */
    uint64_t tracked_bytes;  /* asked for: direct allocations, VMM handles; reserved: driver pools */
    uint64_t idle_bytes;     /* part of tracked: pool bytes under no block */
    uint64_t managed_bytes;
    uint64_t managed_resident_bytes; /* in the device's total, in no process's line */
    uint64_t pinned_bytes;
    uint64_t imported_bytes;
    uint64_t import_charged_bytes; /* of those, what NVML's lists have in this process's line; not in the device's total */
    uint64_t max_used_bytes;
    uint32_t contexts;
    uint32_t instance; /* MIG instance, 0: none */
} sim_usage;

typedef struct {
    uint32_t state; /* 0 free, 1 owned */
    int32_t pid;    /* in the owner's own namespace; for show only */
    uint64_t start_ns;
    uint32_t tag_count; /* tag 0 is the empty one */
    uint32_t uid;
    uint64_t start_ticks; /* of the process: with pid, how it knows its own slot again */
    uint32_t checkpointed; /* its memory was moved to the host: 1 no list has it, 2 lists have it with 0 bytes */
    sim_usage usage[SIM_DEVICES];
} sim_slot;

typedef struct {
    char name[SIM_TAGS][SIM_TAG_BYTES];
    int64_t bytes[SIM_DEVICES][SIM_TAGS];
} sim_tags;

typedef struct {
    char name[96];
    uint8_t uuid[16];
    uint64_t memory_bytes;
    uint64_t reserved_bytes;
    uint64_t context_base_bytes; /* of a process's first context; */
    uint64_t context_next_bytes; /* and of each further one */
    uint64_t processors, threads; /* multiprocessors, and threads that one can hold */
    uint64_t unaccounted_bytes;
    uint64_t charged_bytes; /* of all slots, holds not included; kept by charge and reap */
    uint64_t ghost_bytes;   /* of each ghost */
    uint64_t ghosts;
    uint64_t fault, fault_memory, fault_list, fault_open, fault_events;
    uint64_t mig, mig_hidden, graphics, mps, accounting, display, unified, addressing, numa_node, memory_limit;
    uint64_t utilization, power; /* per cent, W */
    uint64_t accounting_extra; /* bytes that accounting reports beyond the real maximum */
} sim_device;

typedef struct {
    uint32_t pid, device; /* pid 0: free row */
    uint64_t bytes;
} sim_hold;

typedef struct {
    char name[64];
    uint64_t count;
} sim_call_count;

typedef struct {
    uint32_t device, pad; /* SIM_DEVICES: an event of the system, whose data are the id of a GPU */
    uint64_t type, data;
} sim_event;

typedef struct {
    uint32_t pid, device;
    uint64_t max_used_bytes, start_us, time_ms;
} sim_dead;

/* Memory that calls cost (costs.txt). */
typedef struct {
    uint64_t granule;     /* unit in which device memory is charged */
    uint64_t import_percent; /* of imported bytes, what NVML's lists show for the importer, too */
    uint64_t small_limit; /* below it requests share granules, */
    uint64_t small_unit;  /* each in multiples of this */
    uint64_t vmm_granule, pool_step;
    uint64_t green_context;
    uint64_t module_overhead, module_granule;
    uint64_t stack_default, stack_percent;
    uint64_t printf_default, printf_percent, heap_default, heap_percent;
    uint64_t stream, event, graph_exec, peer;
} sim_costs;

typedef struct {
    uint64_t magic, bytes;
    pthread_mutex_t lock;
    uint32_t slot_high; /* slots ever used */
    uint32_t hold_high;
    uint64_t device_count;
    sim_costs cost;
    /* keys */
    uint64_t cuda_version, cuda_alloc_us, cuda_free_us, cuda_context_us, cuda_query_us, cuda_module_bytes, cuda_lazy, cuda_muted;
    uint64_t cuda_fail_percent, latency_sleep, cuda_busy;
    uint64_t cupti_subscribe, cupti_silent, cupti_fatal, cupti_multi;
    uint64_t nvml_driver, nvml_race, nvml_memory_us, nvml_list_us, nvml_list_per_process_us, nvml_list_locks;
    uint64_t nvml_init_us, nvml_wsl, nvml_cc, nvml_protected;
    char driver_version[80];
    char truth[512];
    /* state */
    uint64_t lists, random, strays, violations, hold_reap_ns, device_counts;
    uint32_t event_head, event_word; /* event_word: futex */
    uint32_t call_count, dead_head;
    sim_event event[SIM_EVENTS];
    sim_call_count call[SIM_CALLS];
    sim_dead dead[SIM_DEAD];
    sim_device device[SIM_DEVICES];
    sim_slot slot[SIM_SLOTS];
    sim_hold hold[SIM_HOLDS];
    sim_tags tags[SIM_SLOTS];
} sim_machine;

/* One key that init and set take and show prints (keys.c). */
typedef struct {
    const char *name;
    uint32_t offset, size;
    char kind;          /* n number, b bytes with K/M/G, s string, e enumeration, f the same or code:N */
    char per_device;    /* written gpuN.NAME, or NAME for all devices */
    const char *values; /* e: names in order, separated by '|' */
    const char *help;
} sim_key;

/* Maps $GPUMEM_SIM (or `path`) once per process and keeps its descriptor open for ever: closing any descriptor
 * of the file would drop the record lock of this process's slot. NULL: no machine. */
sim_machine *sim_open(const char *path);
sim_machine *sim_create(const char *path);
int sim_fd(void);
void sim_lock(sim_machine *m);
void sim_unlock(sim_machine *m);
/* Holds the lock over several calls of this thread, so that no list is taken between them. Must not be nested. */
void sim_freeze(sim_machine *m, int on);
uint64_t sim_now_ns(void);
void sim_wait_us(const sim_machine *m, uint64_t us);

/* All below: under the lock. */
int sim_claim(sim_machine *m);                       /* a slot for this process, -1: none free */
/* `own`: the slot of this process, whose lock F_GETLK does not report; SIM_NO_SLOT: it has none, SIM_ASK: unknown. */
#define SIM_NO_SLOT (-1)
#define SIM_ASK (-2)
int sim_owner(sim_machine *m, int slot, int own);    /* pid in our namespace; 0: not visible, -1: dead */
void sim_reap(sim_machine *m, int own, int device);  /* takes dead slots back; device -1: all */
int sim_charge(sim_machine *m, int slot, int device, uint64_t bytes); /* 0, or -1: the device is full */
void sim_discharge(sim_machine *m, int slot, int device, uint64_t bytes);
uint64_t sim_used(const sim_usage *u);
uint64_t sim_listed(const sim_usage *u); /* with charged imports: what NVML's lists show */
uint64_t sim_device_used(sim_machine *m, int device); /* without the system's share */
uint64_t sim_instance_used(sim_machine *m, int device, uint32_t instance);
uint64_t sim_instance_bytes(const sim_machine *m, int device);
uint64_t sim_random(sim_machine *m);
int sim_counter(sim_machine *m, const char *name); /* index into call[] */
void sim_mig_uuid(const sim_machine *m, int device, uint32_t instance, uint8_t uuid[16]);
void sim_uuid_text(const uint8_t uuid[16], const char *prefix, char out[48]);

const sim_key *sim_keys(int *count);
/* Parses a number, of bytes with a suffix K, M, G or T. Returns 0 on success. */
int sim_number(const char *text, int bytes, uint64_t *out);
void sim_defaults(sim_machine *m);
/* Applies costs from text, one for each line: `KEY = VALUE  # evidence`. Returns NULL, or the error; `line` is then the
 * line number. */
const char *sim_costs_of(sim_machine *m, const char *text, int *line);
const char *sim_set(sim_machine *m, const char *word); /* NULL, or the error */
void sim_print_key(const sim_machine *m, const sim_key *key, int device, char *out, int size);

static inline uint64_t sim_round(uint64_t bytes, uint64_t unit) {
    return unit ? (bytes + unit - 1) / unit * unit : bytes;
}

#endif
