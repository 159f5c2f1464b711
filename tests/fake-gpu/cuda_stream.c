/* Streams and events. Work completes at once, unless the machine is `cuda.busy`: then an event becomes ready only when
 * a caller waits for it, its stream or its context. */
#include "cuda_internal.h"

#include <stdlib.h>

static uint64_t marks, done_all; /* events recorded while busy; of those, done in every stream */
static uint64_t *done, stream_ids, done_room; /* done by stream */

static uint64_t id_of(const void *stream) { return (uintptr_t)stream > 2 ? ((const stream_state *)stream)->id : 0; }

/* The driver memory of a stream or event counts as its context's. */
static CUresult small_new(void **out, uint64_t cost, int is_stream) {
    stream_state *made = calloc(1, sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    made->owner = current();
    made->cost = cost;
    enter();
    CUresult result = internal_add(made->owner, (int64_t)cost);
    if (is_stream) made->id = ++stream_ids;
    leave();
    if (result == OK)
        *out = made;
    else
        free(made);
    return result;
}
static CUresult small_end(void *what) {
    stream_state *s = what;
    if (!s) return INVALID_HANDLE;
    enter();
    internal_add(s->owner, -(int64_t)s->cost);
    leave();
    free(s);
    return OK;
}

static CUresult stream_new(void **stream) {
    if (!current()) return INVALID_CONTEXT;
    CUresult result = small_new(stream, machine->cost.stream, 1);
    if (result == OK) tell_resource(STREAM_CREATED, current(), *stream, NULL);
    return result;
}
EXPORT CUresult cuStreamCreate(void **stream, unsigned flags) {
    struct {
        void **stream;
        unsigned flags;
    } params = {stream, flags};
    CALL(124, &params, stream_new(stream));
}
EXPORT CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    struct {
        void **stream;
        unsigned flags;
        int priority;
    } params = {stream, flags, priority};
    CALL(367, &params, stream_new(stream));
}
static CUresult stream_end(void *stream) {
    tell_resource(STREAM_DESTROY, current(), stream, NULL);
    return small_end(stream);
}
EXPORT CUresult cuStreamDestroy_v2(void *stream) { SILENT(stream_end(stream)); }
EXPORT CUresult cuStreamQuery(void *stream) {
    (void)stream;
    SILENT(OK);
}

/* ---- waiting ---- */

void streams_settle(void) {
    done_all = marks;
    pools_synchronize();
}
static CUresult settle(uint64_t stream) {
    enter();
    if (stream >= done_room) {
        uint64_t room = stream_ids + 16;
        done = realloc(done, room * sizeof *done);
        if (!done) abort();
        while (done_room < room) done[done_room++] = 0;
    }
    done[stream] = marks;
    pools_synchronize();
    leave();
    return OK;
}
/* A real driver writes `value` to memory when the stream gets there. Kernels compute nothing here, so no value is read.
 * PyTorch 2.7 to 2.11 resolve the function. */
EXPORT CUresult cuStreamWriteValue32(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    (void)stream, (void)address, (void)value, (void)flags;
    SILENT(OK);
}
EXPORT CUresult cuStreamSynchronize(void *stream) { SILENT(settle(id_of(stream))); }

EXPORT CUresult cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    SILENT(small_new(event, machine->cost.event, 0));
}
EXPORT CUresult cuEventDestroy_v2(void *event) { SILENT(small_end(event)); }
static CUresult record(stream_state *event, const void *stream) {
    if (!event) return INVALID_HANDLE;
    if (!machine->cuda_busy && !event->mark) return OK;
    enter();
    event->id = id_of(stream);
    event->mark = machine->cuda_busy ? ++marks : 0;
    leave();
    return OK;
}
EXPORT CUresult cuEventRecord(void *event, void *stream) { SILENT(record(event, stream)); }
static CUresult query(const stream_state *event) {
    if (!event) return INVALID_HANDLE;
    if (!machine->cuda_busy || !event->mark) return OK;
    enter();
    uint64_t reached = event->id < done_room && done[event->id] > done_all ? done[event->id] : done_all;
    leave();
    return event->mark > reached ? NOT_READY : OK;
}
EXPORT CUresult cuEventQuery(void *event) { SILENT(query(event)); }
static CUresult wait_event(stream_state *event) {
    if (!event) return INVALID_HANDLE;
    event->mark = 0;
    return settle(event->id);
}
EXPORT CUresult cuEventSynchronize(void *event) { SILENT(wait_event(event)); }
