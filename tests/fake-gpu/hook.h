/* Shared by the simulated libcuda and libcupti, which in reality communicate through private tables. */
#ifndef SIM_HOOK_H
#define SIM_HOOK_H

#include <stdatomic.h>
#include <stdint.h>

#include "machine.h"

typedef struct {
    uint32_t site, cbid; /* 0 enter, 1 exit */
    const char *name;
    const void *params;
    const uint32_t *result;
    void *context;
    uint32_t context_uid, correlation_id;
    uint64_t *correlation;
} sim_api_call;

typedef struct {
    uint32_t cbid;
    void *context, *stream;
    const void *descriptor;
} sim_resource;

/* Set once, never freed. One bit for each callback id that any client enabled. */
typedef struct {
    _Atomic uint32_t api[32];
    _Atomic uint32_t resource;
    void (*on_api)(const sim_api_call *call);
    void (*on_resource)(const sim_resource *resource);
} sim_hook;

typedef void sim_set_hook(const sim_hook *hook);
typedef sim_machine *sim_get_machine(void);
typedef uint32_t sim_get_context_uid(void *context);

#endif
