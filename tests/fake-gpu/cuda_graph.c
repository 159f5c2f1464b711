/* Graphs that own memory. An allocation node has an address at once. It has memory from the first launch until the graph
 * is destroyed, from the device's pool for graphs. */
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

typedef struct node {
    struct node *next;
    uint64_t bytes, address; /* address: of the reservation that the program sees */
    int device, freed;
    uint32_t tag; /* of the thread that made the node */
} node;
typedef struct graph {
    node *nodes;
    uint64_t capture; /* number of the capture that it came from */
} graph;
typedef struct graph_exec {
    node *nodes; /* copies */
    uint64_t *live;
    size_t count;
    context *owner;
    uint64_t cost; /* beside the memory of its nodes */
} graph_exec;

/* Data of the callback GRAPHNODE_CREATED. */
typedef struct {
    const void *graph, *original_graph, *node, *original_node;
    uint32_t type;
    const void *dependency, *exec;
} graph_data;

typedef struct {
    struct {
        uint32_t type, handles;
        struct {
            uint32_t type;
            int32_t id;
        } location;
        uint8_t rest[72];
    } props;
    const void *access;
    size_t access_count, bytesize;
    CUdeviceptr dptr;
} alloc_node_params;

static pool *graph_pool(int device) {
    for (int i = 0; i < visible_count; i++)
        if (seen[i].device == device) {
            if (!seen[i].graph_pool) {
                seen[i].graph_pool = pool_make(i, device);
                seen[i].graph_pool->threshold = UINT64_MAX; /* only a trim gives it back */
            }
            return seen[i].graph_pool;
        }
    return NULL;
}

EXPORT CUresult cuGraphCreate(graph **out, unsigned flags) {
    (void)flags;
    SILENT((*out = calloc(1, sizeof **out)) ? OK : OUT_OF_MEMORY);
}
EXPORT CUresult cuGraphDestroy(graph *g) {
    for (node *n = g ? g->nodes : NULL, *next; n; n = next) {
        next = n->next;
        free(n);
    }
    free(g);
    return OK;
}

static CUresult add_alloc(void **out, graph *g, int ordinal, uint64_t bytes, uint64_t *address) {
    const visible *v = see(ordinal);
    if (!out || !g || !v || !bytes) return INVALID_VALUE;
    node *n = calloc(1, sizeof *n);
    if (!n) return OUT_OF_MEMORY;
    enter();
    n->bytes = bytes;
    n->device = v->device;
    n->tag = thread_tag;
    n->address = *address = space_take(sim_round(bytes, SIM_GRANULE), SIM_GRANULE);
    n->next = g->nodes;
    g->nodes = n;
    leave();
    *out = n;
    graph_data data = {g, NULL, n, NULL, 10, NULL, NULL};
    tell_resource(GRAPHNODE_CREATED, current(), NULL, &data);
    return OK;
}
typedef struct {
    void **out;
    graph *g;
    const void *dependencies;
    size_t count;
    alloc_node_params *alloc;
} add_alloc_params;
EXPORT CUresult cuGraphAddMemAllocNode(void **out, graph *g, const void *dependencies, size_t count,
                                       alloc_node_params *alloc) {
    add_alloc_params params = {out, g, dependencies, count, alloc};
    CALL(638, &params,
         alloc ? add_alloc(out, g, alloc->props.location.id, alloc->bytesize, &alloc->dptr) : INVALID_VALUE);
}
static CUresult add_free(void **out, graph *g, uint64_t address) {
    node *n = g ? g->nodes : NULL;
    while (n && n->address != address) n = n->next;
    if (!out || !n) return INVALID_VALUE;
    n->freed = 1;
    *out = &n->freed;
    graph_data data = {g, NULL, *out, NULL, 11, NULL, NULL};
    tell_resource(GRAPHNODE_CREATED, current(), NULL, &data);
    return OK;
}
EXPORT CUresult cuGraphAddMemFreeNode(void **out, graph *g, const void *dependencies, size_t count, CUdeviceptr dptr) {
    struct {
        void **out;
        graph *g;
        const void *dependencies;
        size_t count;
        CUdeviceptr dptr;
    } params = {out, g, dependencies, count, dptr};
    CALL(639, &params, add_free(out, g, dptr));
}

static void forget(graph_exec *e) {
    for (node *n = e->nodes, *next; n; n = next) {
        next = n->next;
        free(n);
    }
    free(e->live);
    free(e);
}

static CUresult instantiate(graph_exec **out, const graph *g) {
    if (!out || !g) return INVALID_VALUE;
    graph_exec *e = calloc(1, sizeof *e);
    if (!e) return OUT_OF_MEMORY;
    for (const node *n = g->nodes; n; n = n->next) {
        node *copy = malloc(sizeof *copy);
        if (!copy) abort();
        *copy = *n;
        copy->next = e->nodes;
        e->nodes = copy;
        e->count++;
    }
    e->live = calloc(e->count + 1, sizeof *e->live);
    e->owner = current();
    enter();
    e->cost = machine->cost.graph_exec;
    CUresult result = internal_add(e->owner, (int64_t)e->cost);
    leave();
    if (result != OK) {
        forget(e);
        return result;
    }
    *out = e;
    graph_data data = {g, NULL, NULL, NULL, 0, NULL, e};
    tell_resource(GRAPHEXEC_CREATED, current(), NULL, &data);
    return OK;
}
EXPORT CUresult cuGraphInstantiateWithFlags(graph_exec **out, graph *g, unsigned long long flags) {
    struct {
        graph_exec **out;
        graph *g;
        unsigned long long flags;
    } params = {out, g, flags};
    CALL(643, &params, instantiate(out, g));
}

EXPORT CUresult cuGraphInstantiate_v2(graph_exec **out, graph *g, void **error_node, char *log, size_t room) {
    struct {
        graph_exec **out;
        graph *g;
        void **error_node;
        char *log;
        size_t room;
    } params = {out, g, error_node, log, room};
    CALL(578, &params, instantiate(out, g));
}
typedef struct {
    graph_exec **out;
    graph *g;
    void *how;
} instantiate_params;
EXPORT CUresult cuGraphInstantiateWithParams(graph_exec **out, graph *g, void *how) {
    instantiate_params params = {out, g, how};
    CALL(656, &params, instantiate(out, g));
}
EXPORT CUresult cuGraphInstantiateWithParams_ptsz(graph_exec **out, graph *g, void *how) {
    instantiate_params params = {out, g, how};
    CALL(657, &params, instantiate(out, g));
}

/* The general form: type 10 is an allocation, 11 a free, anything else a node without memory. */
typedef struct {
    uint32_t type, reserved[3];
    union {
        alloc_node_params alloc;
        CUdeviceptr free;
        uint8_t room[240];
    };
} node_params;
_Static_assert(sizeof(node_params) == 256 && sizeof(alloc_node_params) == 120, "as cuda.h has them");

static CUresult add_node(void **out, graph *g, node_params *p) {
    if (!out || !g || !p) return INVALID_VALUE;
    if (p->type == 10) return add_alloc(out, g, p->alloc.props.location.id, p->alloc.bytesize, &p->alloc.dptr);
    if (p->type == 11) return add_free(out, g, p->free);
    *out = g;
    return OK;
}
EXPORT CUresult cuGraphAddNode(void **out, graph *g, const void *dependencies, size_t count, node_params *node) {
    struct {
        void **out;
        graph *g;
        const void *dependencies;
        size_t count;
        node_params *node;
    } params = {out, g, dependencies, count, node};
    CALL(712, &params, add_node(out, g, node));
}
typedef struct {
    void **out;
    graph *g;
    const void *dependencies, *data;
    size_t count;
    node_params *node;
} add_node_params;
EXPORT CUresult cuGraphAddNode_v2(void **out, graph *g, const void *dependencies, const void *data, size_t count,
                                  node_params *node) {
    add_node_params params = {out, g, dependencies, data, count, node};
    CALL(723, &params, add_node(out, g, node));
}
EXPORT CUresult cuGraphAddNode_v3(void **out, graph *g, const void *dependencies, const void *data, size_t count,
                                  node_params *node) {
    add_node_params params = {out, g, dependencies, data, count, node};
    CALL(863, &params, add_node(out, g, node));
}

/* Allocates memory for every node. Nodes with a free node return it to the pool at the end of the launch. */
static CUresult launch(graph_exec *e) {
    CUresult result = OK;
    size_t i = 0;
    if (!e) return INVALID_VALUE;
    enter();
    uint32_t mine = thread_tag;
    for (node *n = e->nodes; n && result == OK; n = n->next, i++) {
        thread_tag = n->tag;
        if (!e->live[i]) result = pool_take(graph_pool(n->device), n->bytes, GRAPH, &e->live[i]);
    }
    thread_tag = mine;
    i = 0;
    for (node *n = e->nodes; n; n = n->next, i++)
        if (n->freed && e->live[i]) {
            free_row(row_find(e->live[i]));
            e->live[i] = 0;
        }
    leave();
    return result;
}
typedef struct {
    graph_exec *exec;
    void *stream;
} launch_params;
EXPORT CUresult cuGraphLaunch(graph_exec *e, void *stream) {
    launch_params params = {e, stream};
    CALL(514, &params, launch(e));
}
EXPORT CUresult cuGraphUpload(graph_exec *e, void *stream) {
    launch_params params = {e, stream};
    CALL(580, &params, launch(e));
}
static CUresult destroy(graph_exec *e) {
    if (!e) return INVALID_VALUE;
    graph_data data = {NULL, NULL, NULL, NULL, 0, NULL, e};
    tell_resource(GRAPHEXEC_DESTROY, current(), NULL, &data);
    enter();
    for (size_t i = 0; i < e->count; i++)
        if (e->live[i] && row_find(e->live[i])) free_row(row_find(e->live[i]));
    internal_add(e->owner, -(int64_t)e->cost);
    leave();
    forget(e);
    return OK;
}
EXPORT CUresult cuGraphExecDestroy(graph_exec *e) {
    struct {
        graph_exec *exec;
    } params = {e};
    CALL(516, &params, destroy(e));
}

/* ---- capture of a stream ---- */

/* 0, 1 and 2 are the default streams, which cannot be captured. */
int capturing(const void *stream) { return (uintptr_t)stream > 2 && ((const stream_state *)stream)->into != NULL; }

CUresult capture_alloc(void *stream, int ordinal, uint64_t bytes, uint64_t *address) {
    void *node;
    return add_alloc(&node, ((stream_state *)stream)->into, ordinal, bytes, address);
}
CUresult capture_free(void *stream, uint64_t address) {
    void *node;
    return add_free(&node, ((stream_state *)stream)->into, address);
}
static CUresult begin_capture(stream_state *stream) {
    static _Atomic uint64_t captures;
    CUresult result = cuGraphCreate(&stream->into, 0);
    if (result == OK) stream->into->capture = ++captures;
    return result;
}
EXPORT CUresult cuStreamBeginCapture_v2(void *stream, int mode) {
    (void)mode;
    if ((uintptr_t)stream <= 2 || capturing(stream)) return INVALID_VALUE;
    SILENT(begin_capture(stream));
}
EXPORT CUresult cuStreamEndCapture(void *stream, graph **out) {
    if (!capturing(stream) || !out) return INVALID_VALUE;
    *out = ((stream_state *)stream)->into;
    ((stream_state *)stream)->into = NULL;
    return OK;
}
EXPORT CUresult cuStreamIsCapturing(void *stream, int *status) { SILENT((*status = capturing(stream), OK)); }
static CUresult capture_info(void *stream, int *status, uint64_t *id, graph **into, const void **dependencies, size_t *count) {
    graph *g = capturing(stream) ? ((stream_state *)stream)->into : NULL;
    if (!status) return INVALID_VALUE;
    *status = g != NULL;
    if (id) *id = g ? g->capture : 0;
    if (into) *into = g;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return OK;
}
EXPORT CUresult cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, graph **into, const void **dependencies,
                                          size_t *count) {
    SILENT(capture_info(stream, status, id, into, dependencies, count));
}

static CUresult attribute(CUdevice dev, int attr, uint64_t *value) {
    const visible *v = see(dev);
    if (!v || !value || attr < 0 || attr > 3) return INVALID_VALUE;
    enter();
    const pool *p = graph_pool(v->device);
    const uint64_t all[] = {p->used, p->used_high, p->reserved, p->reserved_high};
    *value = all[attr];
    leave();
    return OK;
}
typedef struct {
    CUdevice dev;
    int attr;
    void *value;
} graph_mem_params;
EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice dev, int attr, void *value) {
    graph_mem_params params = {dev, attr, value};
    CALL(641, &params, attribute(dev, attr, value));
}
static CUresult trim(CUdevice dev) {
    const visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    enter();
    pool_trim(graph_pool(v->device), 0);
    leave();
    return OK;
}
EXPORT CUresult cuDeviceGraphMemTrim(CUdevice dev) {
    struct {
        CUdevice dev;
    } params = {dev};
    CALL(640, &params, trim(dev));
}
