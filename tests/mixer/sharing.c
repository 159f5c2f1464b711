/* Commands for memory of other processes, and for sharing memory with them. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "words.h"

#define WORD(name) static int name(void)

WORD(ipc_get) { /* ADDRESS; says the handle */
    sealed handle;
    int result = cu.cuIpcGetMemHandle(&handle, number());
    if (!result) say_sealed(&handle);
    return result;
}
WORD(ipc_open) { /* NAME HANDLE */
    uint64_t *name = new_name();
    sealed handle;
    read_sealed(&handle);
    return cu.cuIpcOpenMemHandle_v2(name, handle, 1);
}
WORD(ipc_close) { return cu.cuIpcCloseMemHandle(number()); }

WORD(export_backing) { /* HANDLE; says the descriptor */
    int fd = -1;
    int result = cu.cuMemExportToShareableHandle(&fd, number(), 1, 0);
    say_number((uint64_t)fd);
    return result;
}
WORD(close_descriptor) { /* FD, as export said it */
    return close((int)number());
}
/* Gets a descriptor of another test process, as a socket would pass it. */
static int descriptor_of(uint64_t pid, uint64_t fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%u", (unsigned)pid, (unsigned)fd);
    return open(path, O_RDWR);
}
WORD(import_backing) { /* NAME PID FD */
    uint64_t *name = new_name(), pid = number();
    int fd = descriptor_of(pid, number());
    int result = fd < 0 ? -1 : cu.cuMemImportFromShareableHandle(name, (void *)(intptr_t)fd, 1);
    if (fd >= 0) close(fd);
    return result;
}

WORD(export_pool) { /* POOL; says the descriptor */
    int fd = -1;
    int result = cu.cuMemPoolExportToShareableHandle(&fd, handle(), 1, 0);
    say_number((uint64_t)fd);
    return result;
}
WORD(import_pool) { /* NAME FD */
    uint64_t *name = new_name();
    return cu.cuMemPoolImportFromShareableHandle((void **)name, handle(), 1, 0);
}
WORD(export_pointer) { /* ADDRESS; says what names it */
    sealed data;
    int result = cu.cuMemPoolExportPointer(&data, number());
    if (!result) say_sealed(&data);
    return result;
}
WORD(import_pointer) { /* NAME POOL DATA */
    uint64_t *name = new_name();
    void *pool = handle();
    sealed data;
    read_sealed(&data);
    return cu.cuMemPoolImportPointer(name, pool, &data);
}

WORD(external) { /* NAME BYTES */
    uint64_t *name = new_name();
    foreign shape = {.type = 1, .bytes = number()};
    return cu.cuImportExternalMemory((void **)name, &shape);
}
WORD(external_map) { /* NAME MEMORY OFFSET BYTES */
    uint64_t *name = new_name();
    void *memory = handle();
    foreign_buffer shape = {.offset = number()};
    shape.bytes = number();
    return cu.cuExternalMemoryGetMappedBuffer(name, memory, &shape);
}
WORD(external_end) { return cu.cuDestroyExternalMemory(handle()); }

WORD(multicast) { /* NAME BYTES */
    uint64_t *name = new_name();
    team shape = {.devices = 2, .bytes = number(), .handles = 1};
    return cu.cuMulticastCreate(name, &shape);
}
WORD(multicast_add) { /* HANDLE ORDINAL */
    uint64_t handle = number();
    return cu.cuMulticastAddDevice(handle, (int)number());
}
WORD(multicast_bind) { /* HANDLE MEMORY BYTES */
    uint64_t handle = number(), memory = number();
    return cu.cuMulticastBindMem(handle, 0, memory, 0, number(), 0);
}
WORD(multicast_unbind) { /* HANDLE ORDINAL BYTES */
    uint64_t handle = number();
    int ordinal = (int)number();
    return cu.cuMulticastUnbind(handle, ordinal, 0, number());
}

const command sharing_words[] = {
    {"ipc-get", ipc_get}, {"ipc-open", ipc_open}, {"ipc-close", ipc_close},
    {"close", close_descriptor}, {"export", export_backing}, {"import", import_backing},
    {"export-pool", export_pool}, {"import-pool", import_pool},
    {"export-pointer", export_pointer}, {"import-pointer", import_pointer},
    {"external", external}, {"external-map", external_map}, {"external-end", external_end},
    {"multicast", multicast}, {"multicast-add", multicast_add}, {"multicast-bind", multicast_bind},
    {"multicast-unbind", multicast_unbind},
    {NULL, NULL},
};
