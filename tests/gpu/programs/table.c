/* Commands for the driver's objects other than memory: modules and their launches, streams, events, executable graphs,
 * green contexts, peers, multicast objects. */
#include <stdio.h>
#include <stdlib.h>

#include "cuda.h"

static void *modules[64];
static int module_count;
static void *streams[1024], *events[1024], *executables[1024], *green, *captured_graph;
static int stream_count, event_count, executable_count;
enum { PRINTF = 1, MALLOC = 2 };

void forget_modules(void) { module_count = stream_count = event_count = executable_count = 0; }

/* ---- modules, as PTX for the driver's own compiler ---- */

/* Keeps the given number of bytes of local memory for each thread. */
static void write_local(FILE *out, uint64_t local) {
    fprintf(out, ".local .align 8 .b8 depot[%llu];\n.reg .b64 %%a<9>;\n.reg .b32 %%r<4>;\n"
                 "mov.u64 %%a1, depot;\nld.param.u64 %%a2, [out];\ncvta.to.global.u64 %%a3, %%a2;\n"
                 "mov.u32 %%r1, %%tid.x;\ncvt.u64.u32 %%a4, %%r1;\nadd.u64 %%a5, %%a1, %%a4;\n"
                 "st.local.u8 [%%a5], %%r1;\n"
                 /* Read at another address than written, so that the value is unknown before it runs. */
                 "xor.b64 %%a6, %%a4, 5;\nadd.u64 %%a7, %%a1, %%a6;\nld.local.u8 %%r2, [%%a7];\n"
                 "st.global.u8 [%%a3], %%r2;\n", (unsigned long long)local);
}

/* Never printed, so that replies on standard output stay intact; the compiler cannot know that. */
static void write_printf(FILE *out) {
    fprintf(out, "{\n.reg .b64 %%p<3>;\n.reg .b32 %%t;\n.reg .pred %%q;\nmov.u32 %%t, %%tid.x;\n"
                 "setp.lt.u32 %%q, %%t, 1000;\n@%%q bra QUIET;\n.param .b64 format;\n.param .b64 list;\n.param .b32 said;\n"
                 "mov.u64 %%p1, text;\ncvta.global.u64 %%p1, %%p1;\nmov.u64 %%p2, 0;\n"
                 "st.param.b64 [format], %%p1;\nst.param.b64 [list], %%p2;\n"
                 "call.uni (said), vprintf, (format, list);\nQUIET:\n}\n");
}

static void write_malloc(FILE *out) {
    fprintf(out, "{\n.reg .b64 %%m<2>;\n.param .b64 size;\n.param .b64 got;\nmov.u64 %%m1, 64;\n"
                 "st.param.b64 [size], %%m1;\ncall.uni (got), malloc, (size);\nld.param.b64 %%m1, [got];\n"
                 ".param .b64 back;\nst.param.b64 [back], %%m1;\ncall.uni free, (back);\n}\n");
}

/* A kernel of about 4 KiB. */
static void write_code(FILE *out, uint64_t number) {
    fprintf(out, ".visible .entry code%llu(.param .u64 out)\n{\n.reg .f32 %%f<3>;\n.reg .b64 %%a<3>;\n"
                 "ld.param.u64 %%a1, [out];\ncvta.to.global.u64 %%a2, %%a1;\nld.global.f32 %%f1, [%%a2];\n"
                 "ld.global.f32 %%f2, [%%a2+4];\n", (unsigned long long)number);
    for (int i = 0; i < 256; i++) fprintf(out, "fma.rn.f32 %%f1, %%f1, %%f1, %%f2;\n");
    fprintf(out, "st.global.f32 [%%a2], %%f1;\nret;\n}\n");
}

/* Globals of GLOBALS bytes; a kernel `work` that keeps LOCAL bytes of local memory a thread and USES printf (1), malloc
 * (2); CODE more kernels. */
static void module(void) {
    uint64_t globals = number(), local = number(), code = number(), uses = number();
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out) abort();
    fprintf(out, ".version 7.0\n.target sm_75\n.address_size 64\n");
    if (globals) fprintf(out, ".visible .global .align 8 .b8 data%d[%llu];\n", module_count, (unsigned long long)globals);
    if (uses & PRINTF)
        fprintf(out, ".extern .func (.param .b32 said) vprintf (.param .b64 format, .param .b64 list);\n"
                     ".global .align 1 .b8 text[4] = {46, 10, 0, 0};\n");
    if (uses & MALLOC)
        fprintf(out, ".extern .func (.param .b64 got) malloc (.param .b64 size);\n.extern .func free (.param .b64 back);\n");
    fprintf(out, ".visible .entry work(.param .u64 out)\n{\n");
    if (local) write_local(out, local);
    if (uses & PRINTF) write_printf(out);
    if (uses & MALLOC) write_malloc(out);
    fprintf(out, "ret;\n}\n");
    for (uint64_t i = 0; i < code; i++) write_code(out, i);
    fclose(out);
    const char *dump = getenv("GPU_SUITE_PTX"); /* file for the generated PTX, for debugging */
    FILE *copy = dump ? fopen(dump, "w") : NULL;
    if (copy) {
        fputs(text, copy);
        fclose(copy);
    }
    void *made = NULL;
    mark();
    result r = module_count < 64 ? cuModuleLoad(&made, text) : -1;
    if (!r) modules[module_count++] = made;
    reply(r, began(), "\"id\":%d", module_count - 1);
    free(text);
}

static void module_unload(void) {
    uint64_t id = number();
    result r = id < 64 && modules[id] ? cuModuleUnload(modules[id]) : -1;
    if (!r) modules[id] = NULL;
    done(r);
}

/* The module's kernel on one block of 32 threads; it writes a byte to the allocation `to`. */
static void launch(void) {
    uint64_t id = number();
    row *to = kept(number());
    void *function = NULL;
    result r = cuLaunch && id < 64 && modules[id] && to ? cuModuleFunction(&function, modules[id], "work") : NOT_FOUND;
    void *arguments[] = {to ? &to->what : NULL};
    mark();
    if (!r) r = cuLaunch(function, 1, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL);
    if (!r) r = cuCtxSynchronize();
    done(r);
}

/* ---- many of one kind ---- */

static result stream_make(void **out) { return cuStreamCreate(out, 1); }
static result event_make(void **out) { return cuEventCreate(out, 0); }
static result executable_make(void **out) {
    result r = cuGraphInstantiate(out, captured_graph, 0);
    return r ? r : cuGraphLaunch(*out, stream);
}

static void make(void **all, int *count, result (*one)(void **)) {
    uint64_t wanted = number();
    result r = 0;
    mark();
    for (; wanted && *count < 1024 && !(r = one(&all[*count])); wanted--) ++*count;
    if (!r && cuCtxSynchronize) r = cuCtxSynchronize();
    reply(r, began(), "\"count\":%d", *count);
}
static void unmake(void **all, int *count, result (*one)(void *)) {
    result r = 0;
    mark();
    while (*count && !(r = one(all[*count - 1]))) --*count;
    done(r);
}
static void streams_make(void) { make(streams, &stream_count, stream_make); }
static void streams_end(void) { unmake(streams, &stream_count, cuStreamDestroy); }
static void events_make(void) { make(events, &event_count, event_make); }
static void events_end(void) { unmake(events, &event_count, cuEventDestroy); }

/* A graph of NODES memsets of an allocation, out of a captured stream: instantiated and launched COUNT times. */
static void graphs_make(void) {
    row *to = kept(number());
    uint64_t nodes = number();
    if (!stream) cuStreamCreate(&stream, 1);
    result r = to && cuStreamBeginCapture && cuStreamEndCapture ? cuStreamBeginCapture(stream, 2) : NOT_FOUND;
    for (uint64_t i = 0; i < nodes && !r; i++) r = cuMemsetAsync(to->what, (unsigned char)i, 16, stream);
    if (!r) r = cuStreamEndCapture(stream, &captured_graph);
    if (r)
        done(r);
    else
        make(executables, &executable_count, executable_make);
}
static void graphs_end(void) { unmake(executables, &executable_count, cuGraphExecDestroy); }

/* ---- green contexts, peers, multicast ---- */

/* A green context with all multiprocessors, the device's own resource. */
static void green_make(void) {
    uint64_t resource[256] = {0}; /* the structure grew over the versions */
    void *description = NULL;
    result r = cuGreenCreate ? 0 : NOT_FOUND;
    if (!r && cuDeviceResource && cuResourceDescribe) {
        r = cuDeviceResource(device, resource, 1);
        if (!r) r = cuResourceDescribe(&description, resource, 1);
    }
    mark();
    if (!r) r = cuGreenCreate(&green, description, device, 1);
    done(r);
}
static void green_end(void) {
    result r = green && cuGreenDestroy ? cuGreenDestroy(green) : -1;
    green = NULL;
    done(r);
}

/* Enables access to the other device's memory. */
static void peer(void) {
    int other = (int)number(), can = 0;
    void *theirs = NULL;
    result r = cuCanAccessPeer ? cuCanAccessPeer(&can, device, other) : NOT_FOUND;
    if (!r && !can) r = -1;
    if (!r) r = cuPrimaryRetain(&theirs, other);
    mark();
    if (!r) r = cuEnablePeer(theirs, 0);
    done(r);
}

/* An object over this device only, with memory bound to it. Its own cost is the charge beyond that memory. */
static void multicast(void) {
    multicast_properties p = {.devices = 1, .bytes = number()};
    allocation_properties memory = {.type = 1, .where = {1, device}};
    size_t unit = 0;
    uint64_t object = 0, bound = 0;
    int can = 0;
    if (cuDeviceGetAttribute) cuDeviceGetAttribute(&can, 132, device);
    if (!can || !cuMulticastCreate || !cuMulticastGranularity) {
        reply(NOT_FOUND, began(), "\"error\":\"no multicast on this device\"");
        return;
    }
    result r = cuMulticastGranularity(&unit, &p, 0);
    if (!r && unit) p.bytes = (p.bytes + unit - 1) / unit * unit;
    mark();
    if (!r) r = cuMulticastCreate(&object, &p);
    if (!r) r = cuMulticastAdd(object, device);
    if (!r) r = cuMemCreate(&bound, p.bytes, &memory, 0);
    if (!r) r = cuMulticastBind(object, 0, bound, 0, p.bytes, 0);
    reply(r, began(), "\"bytes\":%zu,\"granularity\":%zu", p.bytes, unit);
}

const command table_commands[] = {
    {"module", module, "GLOBALS [LOCAL CODE USES]"}, {"module_unload", module_unload, "ID"},
    {"launch", launch, "MODULE ALLOCATION"}, {"streams", streams_make, "COUNT"}, {"streams_end", streams_end, ""},
    {"events", events_make, "COUNT"}, {"events_end", events_end, ""}, {"graphs", graphs_make, "ALLOCATION NODES COUNT"},
    {"graphs_end", graphs_end, ""}, {"green", green_make, ""}, {"green_end", green_end, ""}, {"peer", peer, "ORDINAL"},
    {"multicast", multicast, "BYTES"}, {NULL, NULL, NULL},
};
