/* Internals of the simulated libnvidia-ml. SIM_NVML selects the driver release: 3 (570), 535 (535.54.03: 32-byte
 * records under the _v3 names), 2 (470: no _v3, no MemoryInfo_v2) or 1 (only the first names). */
#ifndef SIM_NVML_INTERNAL_H
#define SIM_NVML_INTERNAL_H

#include <stdint.h>

#include "machine.h"

#define EXPORT __attribute__((visibility("default")))
typedef uint32_t nvmlReturn;
enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMED_OUT = 10,
    GPU_IS_LOST = 15,
    RESET_REQUIRED = 16,
    VERSION_MISMATCH = 18,
    ARGUMENT_VERSION = 25,
    UNKNOWN = 999,
};
#define ABSENT_ID 0xffffffffu

/* A handle is the address of such a structure. */
typedef struct {
    int device;
    uint32_t instance; /* MIG instance, 0: the GPU itself */
} handle;

extern sim_machine *machine;
extern handle handles[SIM_DEVICES][8];

enum lane { LANE_OTHER, LANE_MEMORY, LANE_LIST };
nvmlReturn begin(int *counter, const char *name);
uint64_t fault_of(const handle *h, enum lane lane);
nvmlReturn begin_device(int *counter, const char *name, const handle *h, enum lane lane, int *hide_bytes);

/* Counts the call and checks that NVML is initialised. */
#define BEGIN()                                       \
    static int counter_ = -1;                         \
    nvmlReturn begun_ = begin(&counter_, __func__);   \
    if (begun_ != OK) return begun_
/* Also checks the handle and the device's fault. A hanging device blocks the caller here. */
#define BEGIN_DEVICE(h, lane, hide)                                             \
    static int counter_ = -1;                                                   \
    nvmlReturn begun_ = begin_device(&counter_, __func__, (h), (lane), (hide)); \
    if (begun_ != OK) return begun_

#endif
