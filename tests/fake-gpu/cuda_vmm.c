/* Virtual memory management: a handle costs memory from its creation until it is neither referenced nor mapped. Addresses
 * cost no memory. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda_internal.h"

typedef struct handle {
    struct handle *next;
    uint64_t number, bytes;
    uint32_t references, mappings, tag;
    int device; /* -1: host memory */
    struct {
        int fd;
        uint64_t inode;
    } exports[4]; /* descriptors that it was exported to; the inode tells whether one was closed */
    int exported;
    int segment, imported, multicast;
} handle;

typedef struct mapping {
    struct mapping *next;
    uint64_t address, bytes;
    handle *of;
} mapping;

typedef struct reservation {
    struct reservation *next;
    uint64_t address, bytes;
} reservation;

static handle *handles;
static mapping *mappings;
static reservation *reservations;
static uint64_t numbers = 0x1000;

typedef struct {
    uint32_t type, id;
} location;
typedef struct {
    uint32_t type, handle_types;
    location where;
    void *security;
    uint8_t flags[8];
} allocation_prop;

static handle *find(uint64_t number) {
    handle *h = handles;
    while (h && h->number != number) h = h->next;
    return h;
}

static int is_exported(handle *h) {
    for (int i = h->exported; i-- > 0;) {
        struct stat now;
        if (!fstat(h->exports[i].fd, &now) && now.st_ino == h->exports[i].inode) continue;
        h->exports[i] = h->exports[--h->exported];
    }
    return h->exported;
}

static void drop_unused(handle *h) {
    if (h->references || h->mappings || is_exported(h)) return;
    if (h->device >= 0 && !h->imported && !h->multicast) {
        sim_usage *u = usage(h->device);
        u->tracked_bytes -= h->bytes;
        if (h->segment)
            u->idle_bytes -= h->bytes;
        else
            tag_add(h->device, h->tag, -(int64_t)h->bytes);
        sim_discharge(machine, slot, h->device, h->bytes);
    }
    if (h->imported && h->device >= 0) import_add(usage(h->device), -(int64_t)h->bytes);
    for (handle **at = &handles; *at; at = &(*at)->next)
        if (*at == h) {
            *at = h->next;
            break;
        }
    free(h);
}

/* The kernel notifies the real driver of a close; this one checks at each cuMemAlloc. Under the lock. */
void vmm_settle(void) {
    for (handle *h = handles, *next; h; h = next) {
        next = h->next;
        drop_unused(h);
    }
}

static handle *add(uint64_t bytes, int device) {
    handle *h = calloc(1, sizeof *h);
    if (!h) abort();
    *h = (handle){.next = handles, .number = ++numbers, .bytes = bytes, .references = 1, .device = device,
                  .tag = thread_tag};
    handles = h;
    return h;
}

static CUresult make(uint64_t *out, uint64_t bytes, const allocation_prop *prop) {
    if (!out || !prop || !bytes || bytes % machine->cost.vmm_granule || prop->type != 1) return INVALID_VALUE;
    const visible *v = prop->where.type == 1 ? see((int)prop->where.id) : NULL;
    if (prop->where.type == 1 && !v) return INVALID_DEVICE;
    cost_before(machine->cuda_alloc_us);
    enter();
    CUresult result = v && sim_charge(machine, slot, v->device, bytes) ? OUT_OF_MEMORY : OK;
    if (result == OK) {
        handle *h = add(bytes, v ? v->device : -1);
        if (v) {
            usage(v->device)->tracked_bytes += bytes;
            tag_add(v->device, h->tag, (int64_t)bytes);
        }
        *out = h->number;
    }
    leave();
    cost_after(machine->cuda_alloc_us);
    return result;
}
EXPORT CUresult cuMemCreate(uint64_t *out, size_t size, const allocation_prop *prop, unsigned long long flags) {
    struct {
        uint64_t *handle;
        size_t size;
        const allocation_prop *prop;
        unsigned long long flags;
    } params = {out, size, prop, flags};
    CALL(549, &params, make(out, size, prop));
}

static CUresult release(uint64_t number) {
    cost_before(machine->cuda_free_us);
    enter();
    handle *h = find(number);
    CUresult result = h && h->references ? OK : INVALID_VALUE;
    if (result == OK) {
        h->references--;
        drop_unused(h);
    }
    leave();
    cost_after(machine->cuda_free_us);
    return result;
}
EXPORT CUresult cuMemRelease(uint64_t number) {
    struct {
        uint64_t handle;
    } params = {number};
    CALL(550, &params, release(number));
}

static CUresult map(uint64_t address, uint64_t bytes, uint64_t offset, uint64_t number) {
    if (!bytes || bytes % machine->cost.vmm_granule || address % machine->cost.vmm_granule || offset) return INVALID_VALUE;
    enter();
    handle *h = find(number);
    const reservation *r = reservations;
    while (r && !(r->address <= address && address + bytes <= r->address + r->bytes)) r = r->next;
    CUresult result = h && r && (bytes <= h->bytes || h->imported) ? OK : INVALID_VALUE;
    for (const mapping *m = mappings; m && result == OK; m = m->next)
        if (address < m->address + m->bytes && m->address < address + bytes) result = INVALID_VALUE;
    if (result == OK) {
        mapping *m = malloc(sizeof *m);
        if (!m) abort();
        *m = (mapping){mappings, address, bytes, h};
        mappings = m;
        h->mappings++;
    }
    leave();
    return result;
}
EXPORT CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, uint64_t number, unsigned long long flags) {
    struct {
        CUdeviceptr ptr;
        size_t size, offset;
        uint64_t handle;
        unsigned long long flags;
    } params = {ptr, size, offset, number, flags};
    CALL(551, &params, map(ptr, size, offset, number));
}

/* Unmaps whole mappings only, in any number. */
static CUresult unmap(uint64_t address, uint64_t bytes) {
    uint64_t covered = 0;
    enter();
    for (const mapping *m = mappings; m; m = m->next)
        if (address <= m->address && m->address + m->bytes <= address + bytes) covered += m->bytes;
    CUresult result = bytes && covered == bytes ? OK : INVALID_VALUE;
    for (mapping **at = &mappings, *m; result == OK && (m = *at);) {
        if (!(address <= m->address && m->address + m->bytes <= address + bytes)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        if (m->of->segment) segments_cut(m->address, m->bytes);
        m->of->mappings--;
        drop_unused(m->of);
        free(m);
    }
    leave();
    return result;
}
typedef struct {
    CUdeviceptr ptr;
    size_t size;
} range_params;
EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    range_params params = {ptr, size};
    CALL(552, &params, unmap(ptr, size));
}

static CUresult reserve(CUdeviceptr *ptr, size_t size, size_t alignment) {
    if (!ptr || !size || size % machine->cost.vmm_granule) return INVALID_VALUE;
    if (alignment < machine->cost.vmm_granule) alignment = machine->cost.vmm_granule;
    enter();
    reservation *r = malloc(sizeof *r);
    if (!r) abort();
    *r = (reservation){reservations, space_take(size, alignment), size};
    *ptr = r->address;
    if (r->address)
        reservations = r;
    else
        free(r);
    leave();
    return *ptr ? OK : OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags) {
    struct {
        CUdeviceptr *ptr;
        size_t size, alignment;
        CUdeviceptr hint;
        unsigned long long flags;
    } params = {ptr, size, alignment, hint, flags};
    CALL(547, &params, reserve(ptr, size, alignment));
}
static CUresult unreserve(CUdeviceptr ptr, size_t size) {
    CUresult result = INVALID_VALUE;
    enter();
    for (reservation **at = &reservations, *r; (r = *at); at = &r->next) {
        if (r->address != ptr || r->bytes != size) continue;
        const mapping *m = mappings;
        while (m && !(ptr <= m->address && m->address < ptr + size)) m = m->next;
        if (m) break;
        space_give(ptr, size);
        *at = r->next;
        free(r);
        result = OK;
        break;
    }
    leave();
    return result;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    range_params params = {ptr, size};
    CALL(548, &params, unreserve(ptr, size));
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const void *desc, size_t count) {
    struct {
        CUdeviceptr ptr;
        size_t size;
        const void *desc;
        size_t count;
    } params = {ptr, size, desc, count};
    CALL(553, &params, desc && count ? OK : INVALID_VALUE);
}

static CUresult retain(uint64_t *out, uint64_t address) {
    enter();
    const mapping *m = mappings;
    while (m && !(m->address <= address && address < m->address + m->bytes)) m = m->next;
    if (m && out) {
        m->of->references++;
        *out = m->of->number;
    }
    leave();
    return m && out ? OK : INVALID_VALUE;
}
EXPORT CUresult cuMemRetainAllocationHandle(uint64_t *out, void *address) {
    struct {
        uint64_t *handle;
        void *address;
    } params = {out, address};
    CALL(565, &params, retain(out, (uint64_t)(uintptr_t)address));
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const allocation_prop *prop, int option) {
    (void)option;
    SILENT(granularity && prop ? (*granularity = machine->cost.vmm_granule, OK) : INVALID_VALUE);
}

/* ---- sharing: the file descriptor's text carries the size ---- */

static CUresult export_fd(int *fd, uint64_t number, int type) {
    if (!fd || type != 1) return NOT_SUPPORTED;
    struct stat made;
    *fd = (int)syscall(SYS_memfd_create, "gpumem-sim", 0);
    enter();
    handle *h = find(number);
    uint64_t words[2] = {h ? h->bytes : 0, h ? (uint64_t)h->device : 0};
    if (h && h->exported < 4 && !fstat(*fd, &made)) {
        h->exports[h->exported].fd = *fd;
        h->exports[h->exported++].inode = made.st_ino;
    }
    leave();
    if (h && *fd >= 0 && pwrite(*fd, words, sizeof words, 0) == sizeof words) return OK;
    close(*fd);
    return h ? OS_CALL : INVALID_VALUE;
}
EXPORT CUresult cuMemExportToShareableHandle(void *shareable, uint64_t number, int type, unsigned long long flags) {
    struct {
        void *shareable;
        uint64_t handle;
        int type;
        unsigned long long flags;
    } params = {shareable, number, type, flags};
    CALL(554, &params, export_fd(shareable, number, type));
}
static CUresult import_fd(uint64_t *out, int fd) {
    uint64_t words[2];
    if (!out || pread(fd, words, sizeof words, 0) != sizeof words) return INVALID_VALUE;
    enter();
    handle *h = add(words[0], (int)words[1]);
    h->imported = 1;
    if (h->device >= 0) import_add(usage(h->device), (int64_t)h->bytes);
    *out = h->number;
    leave();
    return OK;
}
EXPORT CUresult cuMemImportFromShareableHandle(uint64_t *out, void *os_handle, int type) {
    struct {
        uint64_t *handle;
        void *os_handle;
        int type;
    } params = {out, os_handle, type};
    CALL(555, &params, import_fd(out, (int)(intptr_t)os_handle));
}

/* ---- multicast objects: handles without memory of their own ---- */

static CUresult multicast(uint64_t *out, uint64_t bytes) {
    if (!out || !bytes) return INVALID_VALUE;
    enter();
    handle *h = add(bytes, -1);
    h->multicast = 1;
    *out = h->number;
    leave();
    return OK;
}
EXPORT CUresult cuMulticastCreate(uint64_t *out, const void *prop) {
    struct {
        uint64_t *handle;
        const void *prop;
    } params = {out, prop};
    CALL(706, &params, multicast(out, prop ? ((const uint64_t *)prop)[1] : 0));
}
EXPORT CUresult cuMulticastAddDevice(uint64_t number, CUdevice dev) {
    struct {
        uint64_t handle;
        CUdevice dev;
    } params = {number, dev};
    CALL(707, &params, see(dev) ? OK : INVALID_DEVICE);
}
EXPORT CUresult cuMulticastBindMem(uint64_t number, size_t at, uint64_t memory, size_t offset, size_t size,
                                   unsigned long long flags) {
    struct {
        uint64_t handle;
        size_t at;
        uint64_t memory;
        size_t offset, size;
        unsigned long long flags;
    } params = {number, at, memory, offset, size, flags};
    CALL(708, &params, size ? OK : INVALID_VALUE);
}
EXPORT CUresult cuMulticastBindAddr(uint64_t number, size_t at, CUdeviceptr memory, size_t size,
                                    unsigned long long flags) {
    struct {
        uint64_t handle;
        size_t at;
        CUdeviceptr memory;
        size_t size;
        unsigned long long flags;
    } params = {number, at, memory, size, flags};
    CALL(709, &params, size ? OK : INVALID_VALUE);
}
EXPORT CUresult cuMulticastBindMem_v2(uint64_t number, CUdevice dev, size_t at, uint64_t memory, size_t offset,
                                      size_t size, unsigned long long flags) {
    struct {
        uint64_t handle;
        CUdevice dev;
        size_t at;
        uint64_t memory;
        size_t offset, size;
        unsigned long long flags;
    } params = {number, dev, at, memory, offset, size, flags};
    CALL(820, &params, size ? OK : INVALID_VALUE);
}
EXPORT CUresult cuMulticastBindAddr_v2(uint64_t number, CUdevice dev, size_t at, CUdeviceptr memory, size_t size,
                                       unsigned long long flags) {
    struct {
        uint64_t handle;
        CUdevice dev;
        size_t at;
        CUdeviceptr memory;
        size_t size;
        unsigned long long flags;
    } params = {number, dev, at, memory, size, flags};
    CALL(821, &params, size ? OK : INVALID_VALUE);
}
EXPORT CUresult cuMulticastGetGranularity(size_t *granularity, const void *prop, int option) {
    (void)option;
    SILENT(granularity && prop ? (*granularity = machine->cost.vmm_granule, OK) : INVALID_VALUE);
}
EXPORT CUresult cuMulticastUnbind(uint64_t number, CUdevice dev, size_t offset, size_t size) {
    struct {
        uint64_t handle;
        CUdevice dev;
        size_t offset, size;
    } params = {number, dev, offset, size};
    CALL(710, &params, size ? OK : INVALID_VALUE);
}

/* ---- for the others ---- */

void vmm_forget(int device) {
    for (mapping **at = &mappings, *m; (m = *at);) {
        if (m->of->device != device) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        if (m->of->segment) segments_cut(m->address, m->bytes);
        m->of->mappings--;
        free(m);
    }
    for (handle *h = handles, *next; h; h = next) {
        next = h->next;
        if (h->device != device) continue;
        h->references = h->exported = 0;
        drop_unused(h);
    }
}

/* Makes the handles mapped in the range pool memory. Returns their device, or -1 if no handle is mapped there. */
int vmm_segment(uint64_t address, uint64_t bytes) {
    int device = -1;
    for (const mapping *m = mappings; m; m = m->next) {
        if (m->address + m->bytes <= address || address + bytes <= m->address) continue;
        handle *h = m->of;
        device = h->device;
        if (h->segment || h->imported || h->device < 0) continue;
        h->segment = 1;
        tag_add(h->device, h->tag, -(int64_t)h->bytes);
        usage(h->device)->idle_bytes += h->bytes;
    }
    return device;
}

int vmm_find(uint64_t address, uint64_t *begin, uint64_t *bytes) {
    const mapping *m = mappings;
    while (m && !(m->address <= address && address < m->address + m->bytes)) m = m->next;
    if (!m) return -1;
    *begin = m->address;
    *bytes = m->bytes;
    return m->of->device;
}
