/* Memory of other processes: IPC handles and external memory. The importer is charged only cost.import_percent of the
 * bytes. */
#include <string.h>
#include <unistd.h>

#include "cuda_internal.h"

typedef struct {
    union {
        uint64_t word[8];
        char reserved[64];
    };
} ipc_handle;

static CUresult get_handle(ipc_handle *out, uint64_t address) {
    enter();
    const row *r = row_find(address);
    CUresult result = out && r && r->kind <= SMALL ? OK : INVALID_VALUE;
    if (result == OK) {
        memset(out, 0, sizeof *out);
        out->word[0] = (uint64_t)getpid();
        out->word[1] = address;
        out->word[2] = r->bytes;
        out->word[3] = r->device;
    }
    leave();
    return result;
}
EXPORT CUresult cuIpcGetMemHandle(ipc_handle *out, CUdeviceptr dptr) {
    struct {
        ipc_handle *out;
        CUdeviceptr dptr;
    } params = {out, dptr};
    CALL(328, &params, get_handle(out, dptr));
}

void import_add(sim_usage *u, int64_t bytes) {
    u->imported_bytes += (uint64_t)bytes;
    u->import_charged_bytes = u->imported_bytes * machine->cost.import_percent / 100;
}

static CUresult import(uint64_t *out, uint64_t bytes, int kind) {
    context *c = current();
    if (!c) return INVALID_CONTEXT;
    if (!out || !bytes) return INVALID_VALUE;
    enter();
    *out = space_take(sim_round(bytes, SIM_GRANULE), SIM_GRANULE);
    row *r = row_add(*out);
    r->charged = sim_round(bytes, SIM_GRANULE); /* of address space */
    r->owner = c;
    r->device = (uint16_t)c->device;
    r->kind = (uint16_t)kind;
    r->bytes = bytes;
    import_add(usage(c->device), (int64_t)bytes);
    leave();
    return OK;
}
EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, ipc_handle handle, unsigned flags) {
    struct {
        CUdeviceptr *out;
        ipc_handle handle;
        unsigned flags;
    } params = {out, handle, flags};
    /* A process cannot open its own handle. */
    CALL(567, &params, handle.word[0] == (uint64_t)getpid() ? INVALID_CONTEXT : import(out, handle.word[2], IPC));
}
EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *out, ipc_handle handle, unsigned flags) {
    struct {
        CUdeviceptr *out;
        ipc_handle handle;
        unsigned flags;
    } params = {out, handle, flags};
    CALL(329, &params, handle.word[0] == (uint64_t)getpid() ? INVALID_CONTEXT : import(out, handle.word[2], IPC));
}
static CUresult close_as(uint64_t address, int kind) {
    enter();
    row *r = row_find(address);
    CUresult result = r && r->kind == kind ? free_row(r) : INVALID_VALUE;
    leave();
    return result;
}
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr dptr) {
    struct {
        CUdeviceptr dptr;
    } params = {dptr};
    CALL(330, &params, close_as(dptr, IPC));
}

/* The handle of an external memory is the address that its buffer is mapped at. */
EXPORT CUresult cuImportExternalMemory(uint64_t *out, const void *desc) {
    struct {
        uint64_t *out;
        const void *desc;
    } params = {out, desc};
    CALL(485, &params, desc ? import(out, ((const uint64_t *)desc)[3], EXTERNAL) : INVALID_VALUE);
}
EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *out, uint64_t memory, const void *desc) {
    struct {
        CUdeviceptr *out;
        uint64_t memory;
        const void *desc;
    } params = {out, memory, desc};
    CALL(486, &params, out && desc ? (*out = memory + *(const uint64_t *)desc, OK) : INVALID_VALUE);
}
EXPORT CUresult cuDestroyExternalMemory(uint64_t memory) {
    struct {
        uint64_t memory;
    } params = {memory};
    CALL(488, &params, close_as(memory, EXTERNAL));
}

/* Pools of another process: a local pool without reserved memory, and pointers into it. */
static CUresult export_pointer(ipc_handle *out, CUdeviceptr address) {
    enter();
    const row *r = row_find(address);
    CUresult result = out && r && r->kind == POOLED ? OK : INVALID_VALUE;
    if (result == OK) {
        memset(out, 0, sizeof *out);
        out->word[0] = r->bytes;
    }
    leave();
    return result;
}
EXPORT CUresult cuMemPoolExportPointer(ipc_handle *out, CUdeviceptr dptr) { SILENT(export_pointer(out, dptr)); }
EXPORT CUresult cuMemPoolExportToShareableHandle(void *out, pool *p, int type, unsigned long long flags) {
    (void)flags;
    SILENT(out && p && type == 1 ? (*(int *)out = p->device, OK) : INVALID_VALUE);
}
static CUresult import_pool(pool **out) {
    const visible *v = see(current_ordinal());
    if (!v || !out) return INVALID_VALUE;
    enter();
    *out = pool_make(current_ordinal(), v->device);
    leave();
    return OK;
}
EXPORT CUresult cuMemPoolImportFromShareableHandle(pool **out, void *handle, int type, unsigned long long flags) {
    struct {
        pool **out;
        void *handle;
        int type;
        unsigned long long flags;
    } params = {out, handle, type, flags};
    CALL(614, &params, import_pool(out));
}
EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *out, pool *p, const ipc_handle *data) {
    struct {
        CUdeviceptr *out;
        pool *pool;
        const ipc_handle *data;
    } params = {out, p, data};
    CALL(616, &params, p && data ? import(out, data->word[0], IPC) : INVALID_VALUE);
}
EXPORT CUresult cuExternalMemoryGetMappedMipmappedArray(uint64_t *out, uint64_t memory, const void *desc) {
    struct {
        uint64_t *out;
        uint64_t memory;
        const void *desc;
    } params = {out, memory, desc};
    CALL(487, &params, out && desc ? (*out = memory, OK) : INVALID_VALUE);
}
