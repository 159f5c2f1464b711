/* The keys of a machine: one table for init, set and show. */
#include "machine.h"

#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define M(field) offsetof(sim_machine, field), sizeof(((sim_machine *)0)->field)
#define D(field) offsetof(sim_device, field), sizeof(((sim_device *)0)->field)
#define C(field) offsetof(sim_machine, cost.field), sizeof(((sim_machine *)0)->cost.field)
#define FAULTS "none|lost|hang|no_permission|bytes_unavailable|not_supported|unknown|reset_required|timeout|crash|garbage"

static const sim_key keys[] = {
    {"devices", M(device_count), 'n', 0, NULL, "number of GPUs (1 to 16)"},
    {"cuda.version", M(cuda_version), 'n', 0, NULL, "result of cuDriverGetVersion"},
    {"cuda.alloc_us", M(cuda_alloc_us), 'n', 0, NULL, "time of an allocation; the memory changes hands half-way"},
    {"cuda.free_us", M(cuda_free_us), 'n', 0, NULL, "time of a free, likewise"},
    {"cuda.query_us", M(cuda_query_us), 'n', 0, NULL, "time to query one attribute of a pool"},
    {"cuda.context_us", M(cuda_context_us), 'n', 0, NULL, "time to make a context"},
    {"cost.granule", C(granule), 'b', 0, NULL, "device memory is charged in multiples of this"},
    {"cost.import_percent", C(import_percent), 'n', 0, NULL, "of imported bytes, what NVML's lists show for the importer, too"},
    {"cost.small_limit", C(small_limit), 'b', 0, NULL, "requests below it share granules"},
    {"cost.small_unit", C(small_unit), 'b', 0, NULL, "and take multiples of this there"},
    {"cost.vmm_granule", C(vmm_granule), 'b', 0, NULL, "granularity of handles and mappings"},
    {"cuda.pool_step", C(pool_step), 'b', 0, NULL, "driver pools grow by multiples of this"},
    {"cost.green_context", C(green_context), 'b', 0, NULL, "a green context, in addition to the primary one"},
    {"cost.module_overhead", C(module_overhead), 'b', 0, NULL, "a module, beside its loaded sections"},
    {"cost.module_granule", C(module_granule), 'b', 0, NULL, "a context's modules together are charged in multiples of this"},
    {"cost.stack_default", C(stack_default), 'b', 0, NULL, "stack of a thread that a context holds from its beginning"},
    {"cost.stack_percent", C(stack_percent), 'n', 0, NULL, "of bytes x threads x processors above that"},
    {"cost.printf_default", C(printf_default), 'b', 0, NULL, "printf FIFO that is part of a context"},
    {"cost.printf_percent", C(printf_percent), 'n', 0, NULL, "of what its limit is above that"},
    {"cost.heap_default", C(heap_default), 'b', 0, NULL, "malloc heap that is part of a context"},
    {"cost.heap_percent", C(heap_percent), 'n', 0, NULL, "of what its limit is above that"},
    {"cost.stream", C(stream), 'b', 0, NULL, "a stream"},
    {"cost.event", C(event), 'b', 0, NULL, "an event"},
    {"cost.graph_exec", C(graph_exec), 'b', 0, NULL, "an executable graph, beside its memory nodes"},
    {"cost.peer", C(peer), 'b', 0, NULL, "peer access, for the context that enables it"},
    {"cuda.module_bytes", M(cuda_module_bytes), 'b', 0, NULL, "size of a module that is not an ELF image, globals not counted"},
    {"cuda.lazy", M(cuda_lazy), 'n', 0, NULL, "1: a module costs half at its load, the rest at its first launch"},
    {"cuda.muted", M(cuda_muted), 'n', 0, NULL, "id of a driver call without callbacks, as if made through a private table"},
    {"cuda.fail_percent", M(cuda_fail_percent), 'n', 0, NULL, "share of allocations that fail with 2"},
    {"cuda.busy", M(cuda_busy), 'n', 0, NULL, "1: events recorded now are not ready before somebody waits for them"},
    {"latency", M(latency_sleep), 'e', 0, "spin|sleep", "how the *_us keys pass their time"},
    {"cupti.subscribe", M(cupti_subscribe), 'n', 0, NULL, "result that every cuptiSubscribe gives (39, 15, 999, 2)"},
    {"cupti.silent", M(cupti_silent), 'n', 0, NULL, "1: no callback is delivered (someone finalized CUPTI)"},
    {"cupti.fatal", M(cupti_fatal), 'n', 0, NULL, "1: FATAL_ERROR state callback at the next call, then silence"},
    {"cupti.multi", M(cupti_multi), 'n', 0, NULL, "1: several subscribers may be (driver r610)"},
    {"nvml.driver", M(nvml_driver), 'f', 0, "ok|absent|mismatch", "nvmlInit returns 0, 9, 18 or N"},
    {"nvml.driver_version", M(driver_version), 's', 0, NULL, "empty: that of the library variant"},
    {"nvml.race", M(nvml_race), 'n', 0, NULL, "percent of lists that meet 8 newcomers (INSUFFICIENT_SIZE)"},
    {"nvml.init_us", M(nvml_init_us), 'n', 0, NULL, "time of nvmlInit"},
    {"nvml.memory_us", M(nvml_memory_us), 'n', 0, NULL, "time of a memory info"},
    {"nvml.list_us", M(nvml_list_us), 'n', 0, NULL, "time of a process list"},
    {"nvml.list_per_process_us", M(nvml_list_per_process_us), 'n', 0, NULL, "and for each process in it"},
    {"nvml.list_locks", M(nvml_list_locks), 'n', 0, NULL, "1: no process allocates while a list is made"},
    {"nvml.wsl", M(nvml_wsl), 'n', 0, NULL, "1: as under WSL: the driver model is WDDM, no list has bytes"},
    {"nvml.cc", M(nvml_cc), 'n', 0, NULL, "1: confidential computing is on"},
    {"nvml.protected", M(nvml_protected), 'n', 0, NULL, "then: percent of a process's bytes that are protected, in detail lists"},
    {"truth", M(truth), 's', 0, NULL, "journal file ($GPUMEM_SIM_TRUTH goes first)"},
    {"name", D(name), 's', 1, NULL, "product name"},
    {"memory", D(memory_bytes), 'b', 1, NULL, "total bytes"},
    {"reserved", D(reserved_bytes), 'b', 1, NULL, "the driver's own share (system reserved)"},
    {"context", D(context_base_bytes), 'b', 1, NULL, "what a process's first context costs; sets context_next too"},
    {"context_next", D(context_next_bytes), 'b', 1, NULL, "what each further context costs"},
    {"processors", D(processors), 'n', 1, NULL, "multiprocessors"},
    {"threads", D(threads), 'n', 1, NULL, "threads that a multiprocessor can hold"},
    {"unaccounted", D(unaccounted_bytes), 'b', 1, NULL, "bytes in use that no process owns"},
    {"fault", D(fault), 'f', 1, FAULTS, "fault of every call on the device"},
    {"fault_memory", D(fault_memory), 'f', 1, FAULTS, "fault of its memory info only"},
    {"fault_list", D(fault_list), 'f', 1, FAULTS, "fault of its process lists only"},
    {"fault_open", D(fault_open), 'f', 1, FAULTS, "hang: asking for its UUID, which every opening of NVML does"},
    {"fault_events", D(fault_events), 'f', 1, FAULTS, "fault of registering for its events; hang: of waiting for them"},
    {"mig", D(mig), 'n', 1, NULL, "MIG instances (0: MIG off, up to 7)"},
    {"mig_hidden", D(mig_hidden), 'n', 1, NULL, "1: whoever asks may see none of them"},
    {"graphics", D(graphics), 'n', 1, NULL, "1: its processes are in the graphics list too"},
    {"mps", D(mps), 'n', 1, NULL, "1: and in the MPS list"},
    {"accounting", D(accounting), 'n', 1, NULL, "1: accounting mode is on"},
    {"accounting_extra", D(accounting_extra), 'b', 1, NULL, "accounting's maximum exceeds the held bytes by this much"},
    {"display", D(display), 'n', 1, NULL, "1: a screen is attached and lit"},
    {"unified", D(unified), 'n', 1, NULL, "1: its memory is the system's: memory info is NOT_SUPPORTED"},
    {"addressing", D(addressing), 'e', 1, "none|hmm|ats", "how it addresses the host's memory"},
    {"numa_node", D(numa_node), 'n', 1, NULL, "NUMA node of the host that its memory is; 0: none, NOT_SUPPORTED"},
    {"memory_limit", D(memory_limit), 'b', 1, NULL, "limit of each control group (soft: half); 0: no limits, NOT_SUPPORTED"},
    {"utilization", D(utilization), 'n', 1, NULL, "per cent of the time in which kernels run; 0, and no power: NOT_SUPPORTED"},
    {"power", D(power), 'n', 1, NULL, "power in W; 0: NOT_SUPPORTED"},
    {"ghosts", D(ghosts), 'n', 1, NULL, "processes that are not in this /proc"},
    {"ghost_bytes", D(ghost_bytes), 'b', 1, NULL, "what each ghost holds"},
};

const sim_key *sim_keys(int *count) {
    *count = (int)(sizeof keys / sizeof *keys);
    return keys;
}

/* costs.txt, as it was when this was built. */
static const char costs[] =
#include "costs.inc"
    ;

void sim_defaults(sim_machine *m) {
    m->device_count = 1;
    m->cuda_version = 12080;
    m->cuda_module_bytes = 6ull << 20;
    m->random = 88172645463325252ull;
    for (int d = 0; d < SIM_DEVICES; d++) {
        sim_device *device = &m->device[d];
        snprintf(device->name, sizeof device->name, "Simulated GPU 80GB");
        static const uint8_t uuid[16] = {0x51, 0x00, 0x6d, 0x75, 0x1a, 0x7e, 0x4d, 0x00,
                                         0x80, 0x00, 0x47, 0x50, 0x55, 0x00, 0x00, 0x00};
        memcpy(device->uuid, uuid, 16);
        device->uuid[15] = (uint8_t)d;
        device->memory_bytes = 85520809984ull;
        device->reserved_bytes = 551ull << 20;
        device->ghost_bytes = 256ull << 20;
    }
    int line;
    const char *why = sim_costs_of(m, costs, &line);
    if (why) {
        fprintf(stderr, "costs.txt:%d: %s\n", line, why);
        abort();
    }
}

int sim_number(const char *text, int bytes, uint64_t *out) {
    char *end;
    if (!isdigit((unsigned char)*text)) return -1;
    *out = strtoull(text, &end, 0);
    int shift = 0;
    if (bytes && *end) {
        const char *units = "KMGT", *unit = strchr(units, toupper((unsigned char)*end));
        if (!unit) return -1;
        shift = 10 * (int)(unit - units + 1);
        end++;
        if (!strcmp(end, "iB")) end += 2;
    }
    *out <<= shift;
    return *end ? -1 : 0;
}

static int parse_name(const char *text, const char *values, uint64_t *out) {
    size_t length = strlen(text);
    *out = 0;
    for (const char *at = values;; at++, ++*out) {
        size_t this = strcspn(at, "|");
        if (this == length && !strncmp(at, text, length)) return 0;
        at += this;
        if (!*at) return -1;
    }
}

static const char *store(void *field, const sim_key *key, const char *value) {
    uint64_t number = 0;
    if (key->kind == 's') {
        if (strlen(value) >= key->size) return "the value is too long";
        snprintf(field, key->size, "%s", value);
        return NULL;
    }
    if (key->kind == 'f' && !strncmp(value, "code:", 5) && !sim_number(value + 5, 0, &number) && number < SIM_CODE) {
        *(volatile uint64_t *)field = SIM_CODE | number;
        return NULL;
    }
    int is_name = key->kind == 'e' || key->kind == 'f';
    if (is_name ? parse_name(value, key->values, &number) : sim_number(value, key->kind == 'b', &number))
        return is_name ? key->values : "not a number";
    *(volatile uint64_t *)field = number;
    return NULL;
}

const char *sim_set(sim_machine *m, const char *word) {
    const char *equals = strchr(word, '=');
    if (!equals) return "a key needs =value";
    int device = -1, skip = 0;
    if (sscanf(word, "gpu%d.%n", &device, &skip) == 1 && skip) {
        if (device < 0 || device >= SIM_DEVICES) return "no such device";
    } else {
        device = -1;
        skip = strncmp(word, "gpu*.", 5) ? 0 : 5;
    }
    const char *name = word + skip;
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        if (strlen(keys[k].name) != (size_t)(equals - name) || strncmp(keys[k].name, name, (size_t)(equals - name)))
            continue;
        if (!keys[k].per_device) {
            if (skip) return "not a key of a device";
            const char *why = store((char *)m + keys[k].offset, &keys[k], equals + 1);
            if (m->device_count > SIM_DEVICES) m->device_count = SIM_DEVICES;
            return why;
        }
        for (int d = 0; d < SIM_DEVICES; d++) {
            if (device >= 0 && d != device) continue;
            const char *why = store((char *)&m->device[d] + keys[k].offset, &keys[k], equals + 1);
            if (why) return why;
            if (keys[k].offset == offsetof(sim_device, context_base_bytes))
                m->device[d].context_next_bytes = m->device[d].context_base_bytes;
        }
        return NULL;
    }
    return "unknown key";
}

/* What may stand in a table of costs. */
static int is_cost(const char *name) {
    static const char *const others[] = {"context", "context_next", "processors", "threads", "cuda.pool_step"};
    if (!strncmp(name, "cost.", 5)) return 1;
    if (!strncmp(name, "gpu", 3) && strchr(name, '.')) name = strchr(name, '.') + 1;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(others[i], name)) return 1;
    return 0;
}

const char *sim_costs_of(sim_machine *m, const char *text, int *line) {
    for (*line = 1; *text; ++*line) {
        char copy[256], key[64], value[64], rest[2], word[160];
        size_t length = strcspn(text, "\n"), said = strcspn(text, "#\n");
        if (said >= sizeof copy) return "the line is too long";
        memcpy(copy, text, said);
        copy[said] = 0;
        text += length + (text[length] == '\n');
        if (!copy[strspn(copy, " \t\r")]) continue;
        int parts = sscanf(copy, " %63[^= \t] = %63s %1s", key, value, rest);
        if (parts != 2) return "not `KEY = VALUE  # evidence`";
        if (!is_cost(key)) return "no such cost (fake-gpu keys lists them)";
        snprintf(word, sizeof word, "%s=%s", key, value);
        const char *why = sim_set(m, word);
        if (why) return why;
    }
    *line = 0;
    const sim_costs *c = &m->cost;
    if (!c->granule || !c->small_unit || c->small_unit % 512 || c->granule % c->small_unit)
        return "cost.granule must be a multiple of cost.small_unit, and that of 512";
    if (!c->vmm_granule || c->vmm_granule % 512 || !c->module_granule)
        return "cost.vmm_granule must be a multiple of 512, and cost.module_granule not 0";
    return NULL;
}

void sim_print_key(const sim_machine *m, const sim_key *key, int device, char *out, int size) {
    const char *field = (key->per_device ? (const char *)&m->device[device] : (const char *)m) + key->offset;
    if (key->kind == 's') {
        snprintf(out, (size_t)size, "%s", field);
        return;
    }
    uint64_t number = *(const uint64_t *)field;
    if (key->kind == 'f' && number >= SIM_CODE) {
        snprintf(out, (size_t)size, "code:%llu", (unsigned long long)(number - SIM_CODE));
        return;
    }
    if (key->kind != 'e' && key->kind != 'f') {
        snprintf(out, (size_t)size, "%llu", (unsigned long long)number);
        return;
    }
    const char *at = key->values;
    for (uint64_t i = 0; i < number && *at; i++) at += strcspn(at, "|") + 1;
    snprintf(out, (size_t)size, "%.*s", (int)strcspn(at, "|"), at);
}
