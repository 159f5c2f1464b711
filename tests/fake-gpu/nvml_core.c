/* Opening and closing NVML, versions, errors, what every call begins with. */
#include "nvml_internal.h"
#include "thread_data.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

sim_machine *machine;
handle handles[SIM_DEVICES][8];

static int opened; /* calls of init that no shutdown has met */
static int client = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#if SIM_NVML == 3
static const char version_text[] = "570.172.08", nvml_text[] = "12.570.172.08";
#elif SIM_NVML == 535
static const char version_text[] = "535.54.03", nvml_text[] = "12.535.54.03";
#elif SIM_NVML == 2
static const char version_text[] = "470.256.02", nvml_text[] = "11.470.256.02";
#else
static const char version_text[] = "418.226.00", nvml_text[] = "10.418.226.00";
#endif

/* A lock byte after those of the slots marks that this process has NVML open: set with F_SETLK here, read with F_GETLK
 * by the tool. Descriptors of the machine are never closed, because closing any drops all locks of the process. */
static void register_client(int on) {
    struct flock l = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = SIM_SLOTS + client, .l_len = 1};
    if (!on) {
        if (client >= 0) fcntl(sim_fd(), F_SETLK, &l);
        client = -1;
        return;
    }
    for (int c = 0; c < SIM_CLIENTS && client < 0; c++) {
        l.l_type = F_WRLCK;
        l.l_start = SIM_SLOTS + c;
        if (!fcntl(sim_fd(), F_SETLK, &l)) client = c;
    }
}

static nvmlReturn open_up(const char *name) {
    static int counter = -1;
    nvmlReturn result = OK;
    leave_thread_data();
    pthread_mutex_lock(&lock);
    machine = sim_open(NULL);
    if (!machine || machine->nvml_driver == SIM_DRIVER_ABSENT) result = DRIVER_NOT_LOADED;
    else if (machine->nvml_driver == SIM_DRIVER_MISMATCH) result = VERSION_MISMATCH;
    else if (machine->nvml_driver >= SIM_CODE) result = (nvmlReturn)(machine->nvml_driver - SIM_CODE);
    if (machine) {
        sim_lock(machine);
        if (counter < 0) counter = sim_counter(machine, name);
        machine->call[counter].count++;
        sim_unlock(machine);
    }
    if (result == OK) {
        sim_wait_us(machine, machine->nvml_init_us);
        for (int d = 0; d < SIM_DEVICES; d++)
            for (uint32_t i = 0; i < 8; i++) handles[d][i] = (handle){d, i};
        if (!opened++) register_client(1);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT nvmlReturn nvmlInit_v2(void) { return open_up(__func__); }
EXPORT nvmlReturn nvmlInit(void) { return open_up(__func__); }
EXPORT nvmlReturn nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return open_up(__func__);
}
EXPORT nvmlReturn nvmlShutdown(void) {
    BEGIN();
    pthread_mutex_lock(&lock);
    if (!--opened) register_client(0);
    pthread_mutex_unlock(&lock);
    return OK;
}

nvmlReturn begin(int *counter, const char *name) {
    if (!machine || opened <= 0) return UNINITIALIZED;
    if (*counter < 0) {
        sim_lock(machine);
        *counter = sim_counter(machine, name);
        sim_unlock(machine);
    }
    __atomic_fetch_add(&machine->call[*counter].count, 1, __ATOMIC_RELAXED);
    return OK;
}

uint64_t fault_of(const handle *h, enum lane lane) {
    const volatile sim_device *d = &machine->device[h->device];
    if (d->fault) return d->fault;
    return lane == LANE_MEMORY ? d->fault_memory : lane == LANE_LIST ? d->fault_list : SIM_NONE;
}

static int is_handle(const handle *h) {
    const char *at = (const char *)h, *first = (const char *)handles;
    return at >= first && at < first + sizeof handles && (at - first) % (int)sizeof(handle) == 0 &&
           h->device < (int)machine->device_count && h->instance <= machine->device[h->device].mig;
}

nvmlReturn begin_device(int *counter, const char *name, const handle *h, enum lane lane, int *hide_bytes) {
    nvmlReturn result = begin(counter, name);
    if (result != OK) return result;
    if (!is_handle(h)) return INVALID_ARGUMENT;
    while (lane != LANE_OTHER && fault_of(h, lane) == SIM_HANG) {
        struct timespec t = {0, 2000000};
        nanosleep(&t, NULL);
    }
    if (hide_bytes && machine->nvml_wsl) *hide_bytes = 1;
    uint64_t fault = fault_of(h, lane);
    if (fault >= SIM_CODE) return lane == LANE_OTHER ? OK : (nvmlReturn)(fault - SIM_CODE);
    switch (fault) {
    case SIM_LOST:
        return GPU_IS_LOST;
    case SIM_RESET_REQUIRED:
        return lane == LANE_OTHER ? OK : RESET_REQUIRED;
    case SIM_NO_PERMISSION:
        /* In a container with one MIG slice, the parent refuses its memory too. */
        return lane == LANE_LIST || (lane == LANE_MEMORY && machine->device[h->device].mig && !h->instance)
                   ? NO_PERMISSION
                   : OK;
    case SIM_NOT_SUPPORTED:
        return lane == LANE_OTHER ? OK : NOT_SUPPORTED;
    case SIM_TIMEOUT:
        return lane == LANE_OTHER ? OK : TIMED_OUT;
    case SIM_UNKNOWN:
        return lane == LANE_OTHER ? OK : UNKNOWN;
    case SIM_CRASH:
        if (lane != LANE_OTHER) raise(SIGSEGV);
        return OK;
    case SIM_BYTES_UNAVAILABLE:
        if (hide_bytes) *hide_bytes = 1;
        return OK;
    default:
        return OK;
    }
}

static nvmlReturn text(char *out, unsigned room, const char *value) {
    if (!out) return INVALID_ARGUMENT;
    if (strlen(value) >= room) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return OK;
}
EXPORT nvmlReturn nvmlSystemGetDriverVersion(char *out, unsigned room) {
    BEGIN();
    return text(out, room, machine->driver_version[0] ? machine->driver_version : version_text);
}
EXPORT nvmlReturn nvmlSystemGetNVMLVersion(char *out, unsigned room) {
    BEGIN();
    return text(out, room, nvml_text);
}
EXPORT nvmlReturn nvmlSystemGetCudaDriverVersion_v2(int *out) {
    BEGIN();
    if (!out) return INVALID_ARGUMENT;
    *out = (int)machine->cuda_version;
    return OK;
}
EXPORT nvmlReturn nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

typedef struct {
    unsigned environment, feature, tools;
} conf_state;
EXPORT nvmlReturn nvmlSystemGetConfComputeState(conf_state *out) {
    BEGIN();
    if (!out) return INVALID_ARGUMENT;
    *out = (conf_state){machine->nvml_cc ? 2 : 0, machine->nvml_cc != 0, 0};
    return OK;
}

EXPORT const char *nvmlErrorString(nvmlReturn code) {
    static const struct {
        nvmlReturn code;
        const char *text;
    } errors[] = {{OK, "Success"},
                  {UNINITIALIZED, "Uninitialized"},
                  {INVALID_ARGUMENT, "Invalid Argument"},
                  {NOT_SUPPORTED, "Not Supported"},
                  {NO_PERMISSION, "Insufficient Permissions"},
                  {NOT_FOUND, "Not Found"},
                  {INSUFFICIENT_SIZE, "Insufficient Size"},
                  {DRIVER_NOT_LOADED, "Driver Not Loaded"},
                  {TIMED_OUT, "Timeout"},
                  {GPU_IS_LOST, "GPU is lost"},
                  {RESET_REQUIRED, "GPU requires reset"},
                  {VERSION_MISMATCH, "Driver/library version mismatch"},
                  {ARGUMENT_VERSION, "Argument version mismatch"}};
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].text;
    return "Unknown Error";
}
