/* Streams, events, graphs. */
#include "cudart.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

EXPORT result cudaStreamCreate(void **stream) { RUN(driver.cuStreamCreate(stream, 0)); }
EXPORT result cudaStreamCreateWithFlags(void **stream, unsigned flags) { RUN(driver.cuStreamCreate(stream, flags)); }
EXPORT result cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    RUN(driver.cuStreamCreateWithPriority(stream, flags, priority));
}
EXPORT result cudaStreamDestroy(void *stream) { RUN(driver.cuStreamDestroy_v2(stream)); }
EXPORT result cudaStreamQuery(void *stream) { RUN(driver.cuStreamQuery(stream)); }
EXPORT result cudaStreamSynchronize(void *stream) { RUN(driver.cuStreamSynchronize(stream)); }
EXPORT result cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    RUN(OK);
}
EXPORT result cudaStreamGetPriority(void *stream, int *priority) {
    (void)stream;
    RUN((*priority = 0, OK));
}

/* A host function in a stream runs on a thread of the driver. */
typedef struct {
    void (*plain)(void *);
    void (*callback)(void *, result, void *);
    void *stream, *data;
} host_call;
static void *run_host_call(void *what) {
    host_call call = *(host_call *)what;
    free(what);
    if (call.plain)
        call.plain(call.data);
    else
        call.callback(call.stream, OK, call.data);
    return NULL;
}
static result host_function(host_call call) {
    host_call *copy = malloc(sizeof *copy);
    pthread_t thread;
    if (!copy) return OUT_OF_MEMORY;
    *copy = call;
    if (pthread_create(&thread, NULL, run_host_call, copy)) {
        free(copy);
        return 304;
    }
    pthread_detach(thread);
    return OK;
}
EXPORT result cudaStreamAddCallback(void *stream, void (*callback)(void *, result, void *), void *data, unsigned flags) {
    (void)flags;
    RUN(host_function((host_call){NULL, callback, stream, data}));
}
EXPORT result cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    RUN(host_function((host_call){function, NULL, stream, data}));
}

/* ---- events ---- */

EXPORT result cudaEventCreate(void **event) { RUN(driver.cuEventCreate(event, 0)); }
EXPORT result cudaEventCreateWithFlags(void **event, unsigned flags) { RUN(driver.cuEventCreate(event, flags)); }
EXPORT result cudaEventDestroy(void *event) { RUN(driver.cuEventDestroy_v2(event)); }
EXPORT result cudaEventRecord(void *event, void *stream) { RUN(driver.cuEventRecord(event, stream)); }
EXPORT result cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    (void)flags;
    RUN(driver.cuEventRecord(event, stream));
}
EXPORT result cudaEventQuery(void *event) { RUN(driver.cuEventQuery(event)); }
EXPORT result cudaEventSynchronize(void *event) { RUN(driver.cuEventSynchronize(event)); }
EXPORT result cudaEventElapsedTime(float *ms, void *start, void *end) {
    (void)start, (void)end;
    RUN((*ms = 0, OK));
}
EXPORT result cudaEventElapsedTime_v2(float *ms, void *start, void *end) { return cudaEventElapsedTime(ms, start, end); }
EXPORT result cudaIpcGetEventHandle(ipc_handle *handle, void *event) {
    (void)event;
    RUN((memset(handle, 0, sizeof *handle), OK));
}
EXPORT result cudaIpcOpenEventHandle(void **event, ipc_handle handle) {
    (void)handle;
    RUN(driver.cuEventCreate(event, 0));
}

/* ---- graphs: kernels leave no node in them ---- */

EXPORT result cudaStreamBeginCapture(void *stream, int mode) { RUN(driver.cuStreamBeginCapture_v2(stream, mode)); }
EXPORT result cudaStreamEndCapture(void *stream, void **graph) { RUN(driver.cuStreamEndCapture(stream, graph)); }
EXPORT result cudaStreamIsCapturing(void *stream, int *status) { RUN(driver.cuStreamIsCapturing(stream, status)); }
EXPORT result cudaThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int own;
    int old = own;
    own = *mode;
    *mode = old;
    return OK;
}

static result capture_info(void *stream, int *status, uint64_t *id, void **graph, const void **dependencies,
                           const void **edges, size_t *count) {
    if (edges) *edges = NULL;
    return driver.cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}
#if MAJOR >= 13
EXPORT result cudaStreamGetCaptureInfo(void *stream, int *status, uint64_t *id, void **graph, const void **dependencies,
                                       const void **edges, size_t *count) {
    RUN(capture_info(stream, status, id, graph, dependencies, edges, count));
}
#else
EXPORT result cudaStreamGetCaptureInfo(void *stream, int *status, uint64_t *id) {
    RUN(capture_info(stream, status, id, NULL, NULL, NULL, NULL));
}
EXPORT result cudaStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, void **graph,
                                          const void **dependencies, size_t *count) {
    RUN(capture_info(stream, status, id, graph, dependencies, NULL, count));
}
EXPORT result cudaStreamGetCaptureInfo_v3(void *stream, int *status, uint64_t *id, void **graph,
                                          const void **dependencies, const void **edges, size_t *count) {
    RUN(capture_info(stream, status, id, graph, dependencies, edges, count));
}
#endif

EXPORT result cudaGraphCreate(void **graph, unsigned flags) { ASK(driver.cuGraphCreate(graph, flags)); }
EXPORT result cudaGraphDestroy(void *graph) { ASK(driver.cuGraphDestroy(graph)); }
/* One node stands for all captured work. */
EXPORT result cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    if (nodes && *count) nodes[0] = graph;
    *count = 1;
    return OK;
}
#if MAJOR >= 12
EXPORT result cudaGraphInstantiate(void **exec, void *graph, uint64_t flags) {
    RUN(driver.cuGraphInstantiateWithFlags(exec, graph, flags));
}
#else
EXPORT result cudaGraphInstantiate(void **exec, void *graph, void **node, char *log, size_t room) {
    (void)node, (void)log, (void)room;
    RUN(driver.cuGraphInstantiateWithFlags(exec, graph, 0));
}
#endif
EXPORT result cudaGraphInstantiateWithFlags(void **exec, void *graph, uint64_t flags) {
    RUN(driver.cuGraphInstantiateWithFlags(exec, graph, flags));
}
EXPORT result cudaGraphLaunch(void *exec, void *stream) {
    contents_forget_all();
    RUN(driver.cuGraphLaunch(exec, stream));
}
EXPORT result cudaGraphExecDestroy(void *exec) { ASK(driver.cuGraphExecDestroy(exec)); }
