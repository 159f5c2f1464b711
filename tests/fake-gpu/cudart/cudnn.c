/* cuDNN: descriptors with only the fields that later calls read; sizes of workspaces; recurrent weights laid out as
 * documented. Nothing is computed. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define WORKSPACE (4u << 20) /* of a convolution's plan */

/* One structure for all descriptors; its kind determines which fields are filled. */
typedef struct {
    int type, rank, sizes[8];                          /* tensors */
    int cell, bias, directions, input, hidden, layers; /* recurrent networks */
    int length, batch;                                 /* their data */
} descriptor;

static int make(descriptor **out) { return (*out = calloc(1, sizeof **out)) ? 0 : 4; }
#define DESCRIPTOR(kind)                                                        \
    EXPORT int cudnnCreate##kind##Descriptor(descriptor **out) { return make(out); } \
    EXPORT int cudnnDestroy##kind##Descriptor(descriptor *d) { return free(d), 0; }
DESCRIPTOR(Activation)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(Convolution)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(Pooling)
DESCRIPTOR(RNN)
DESCRIPTOR(RNNData)
DESCRIPTOR(SpatialTransformer)
DESCRIPTOR(Tensor)

EXPORT int cudnnCreate(descriptor **out) { return make(out); }
EXPORT int cudnnDestroy(descriptor *handle) { return free(handle), 0; }

/* The newest of its major version, which the file's name has: a wheel refuses an older one than it was built with. */
EXPORT size_t cudnnGetVersion(void) {
    Dl_info info;
    int is8 = dladdr((void *)(uintptr_t)&cudnnGetVersion, &info) && strstr(info.dli_fname, ".so.8");
    return is8 ? 8999 : 99999;
}
EXPORT size_t cudnnGetCudartVersion(void) { return MAJOR * 1000; }
EXPORT int cudnnGetProperty(int what, int *value) {
    size_t version = cudnnGetVersion();
    *value = what == 0 ? (version < 10000 ? 8 : 9) : 99;
    return 0;
}
EXPORT const char *cudnnGetErrorString(int status) {
    (void)status;
    return "CUDNN_STATUS_SUCCESS";
}
EXPORT void cudnnGetLastErrorString(char *out, size_t room) {
    if (room) *out = 0;
}

/* ---- tensors ---- */

static int set_tensor(descriptor *d, int type, int rank, const int *sizes) {
    if (!d) return 0; /* not wanted */
    d->type = type;
    d->rank = rank < 8 ? rank : 8;
    memcpy(d->sizes, sizes, (size_t)d->rank * sizeof *sizes);
    return 0;
}
EXPORT int cudnnSetTensorNdDescriptor(descriptor *d, int type, int rank, const int *sizes, const int *strides) {
    (void)strides;
    return set_tensor(d, type, rank, sizes);
}
EXPORT int cudnnSetFilterNdDescriptor(descriptor *d, int type, int layout, int rank, const int *sizes) {
    (void)layout;
    return set_tensor(d, type, rank, sizes);
}
EXPORT int cudnnGetTensorNdDescriptor(const descriptor *d, int room, int *type, int *rank, int *sizes, int *strides) {
    *type = d->type;
    *rank = d->rank;
    for (int i = d->rank - 1, step = 1; i >= 0; step *= d->sizes[i], i--)
        if (i < room) sizes[i] = d->sizes[i], strides[i] = step;
    return 0;
}

/* ---- graphs of operations: one engine for each, and one plan ---- */

enum { RESULTS = 202, ENGINE = 300, PLAN_WORKSPACE = 402 };
enum { INT64 = 3, DESCRIPTORS = 15 };

EXPORT int cudnnBackendCreateDescriptor(int kind, descriptor **out) {
    (void)kind;
    return make(out);
}
EXPORT int cudnnBackendDestroyDescriptor(descriptor *d) { return free(d), 0; }
EXPORT int cudnnBackendGetAttribute(descriptor *d, int name, int type, int64_t room, int64_t *count, void *out) {
    (void)d;
    int has = name == RESULTS || name == ENGINE || (type == INT64 && out);
    if (has && type == INT64 && room) *(int64_t *)out = name == PLAN_WORKSPACE ? WORKSPACE : 0;
    if (count) *count = has;
    return 0;
}

/* ---- batch normalisation: small workspaces ---- */

EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int ops, void *x, void *z,
                                                                    void *y, void *scale, void *activation, size_t *out) {
    (void)handle, (void)mode, (void)ops, (void)x, (void)z, (void)y, (void)scale, (void)activation;
    *out = 16384;
    return 0;
}
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int ops, void *x, void *y, void *dy,
                                                             void *dz, void *dx, void *scale, void *activation, size_t *out) {
    (void)handle, (void)mode, (void)ops, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)scale, (void)activation;
    *out = 16384;
    return 0;
}
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int ops, void *activation, void *x,
                                                                size_t *out) {
    (void)handle, (void)mode, (void)ops, (void)activation, (void)x;
    *out = 4096;
    return 0;
}

/* ---- recurrent networks ---- */

EXPORT int cudnnDropoutGetStatesSize(void *handle, size_t *out) {
    (void)handle;
    *out = 1 << 20;
    return 0;
}
EXPORT int cudnnSetRNNDescriptor_v8(descriptor *d, int algorithm, int cell, int bias, int direction, int input_mode,
                                    int type, int precision, int math, int input, int hidden, int projection, int layers,
                                    void *dropout, unsigned flags) {
    (void)algorithm, (void)input_mode, (void)precision, (void)math, (void)projection, (void)dropout, (void)flags;
    *d = (descriptor){.type = type, .cell = cell, .bias = bias, .directions = direction + 1, .input = input,
                      .hidden = hidden, .layers = layers};
    return 0;
}
EXPORT int cudnnSetRNNDataDescriptor(descriptor *d, int type, int layout, int length, int batch, int width, const int *lengths,
                                     void *fill) {
    (void)layout, (void)width, (void)lengths, (void)fill;
    d->type = type;
    d->length = length;
    d->batch = batch;
    return 0;
}

/* Types: 0 float, 1 double, 2 half, 9 bfloat16. Cells: 0 and 1 plain, 2 LSTM, 3 GRU. */
static size_t size_of(int type) { return type == 0 ? 4 : type == 1 ? 8 : 2; }
static size_t gates(const descriptor *d) { return d->cell == 2 ? 4 : d->cell == 3 ? 3 : 1; }
static size_t width_into(const descriptor *d, int pseudo) {
    return pseudo < d->directions ? (size_t)d->input : (size_t)d->hidden * (size_t)d->directions;
}
/* Matrices of all layers before this one, in elements: of each, gates from the input, then gates from the last step. */
static size_t matrices(const descriptor *d, int pseudo) {
    size_t sum = 0;
    for (int p = 0; p < pseudo; p++) sum += gates(d) * (size_t)d->hidden * (width_into(d, p) + (size_t)d->hidden);
    return sum;
}
static size_t biases(const descriptor *d, int pseudo) {
    return d->bias ? 2 * gates(d) * (size_t)d->hidden * (size_t)pseudo : 0;
}
EXPORT int cudnnGetRNNWeightSpaceSize(void *handle, const descriptor *d, size_t *out) {
    (void)handle;
    int all = d->layers * d->directions;
    *out = (matrices(d, all) + biases(d, all)) * size_of(d->type);
    return 0;
}
/* A caller passes NULL for results that it does not need. */
EXPORT int cudnnGetRNNWeightParams(void *handle, const descriptor *d, int pseudo, size_t bytes, char *space, int gate,
                                   descriptor *matrix, char **matrix_at, descriptor *bias, char **bias_at) {
    (void)handle, (void)bytes;
    size_t hidden = (size_t)d->hidden, into = width_into(d, pseudo), count = gates(d), number = (size_t)gate;
    size_t at = matrices(d, pseudo);
    at += number < count ? number * hidden * into : count * hidden * into + (number - count) * hidden * hidden;
    if (matrix_at) *matrix_at = space + at * size_of(d->type);
    set_tensor(matrix, d->type, 3, (int[]){1, d->hidden, (int)(number < count ? into : hidden)});
    at = matrices(d, d->layers * d->directions) + biases(d, pseudo) + number * hidden;
    if (bias_at) *bias_at = d->bias ? space + at * size_of(d->type) : NULL;
    set_tensor(bias, d->type, 3, (int[]){1, d->hidden, 1});
    return 0;
}
EXPORT int cudnnGetRNNTempSpaceSizes(void *handle, const descriptor *d, int mode, const descriptor *data, size_t *work,
                                     size_t *reserve) {
    (void)handle, (void)mode;
    size_t step = (size_t)data->batch * (size_t)d->hidden * gates(d) * (size_t)d->directions * size_of(d->type);
    *work = 2 * step * (size_t)data->length;
    if (reserve) *reserve = 3 * step * (size_t)data->length * (size_t)d->layers;
    return 0;
}

/* The same functions before cuDNN 8: the input's width is in its tensor descriptor. */
EXPORT int cudnnSetRNNDescriptor_v6(void *handle, descriptor *d, int hidden, int layers, void *dropout, int input_mode,
                                    int direction, int cell, int algorithm, int type) {
    (void)handle;
    return cudnnSetRNNDescriptor_v8(d, algorithm, cell, 2, direction, input_mode, type, type, 0, 0, hidden, 0, layers, dropout, 0);
}
EXPORT int cudnnGetRNNParamsSize(void *handle, descriptor *d, const descriptor *x, size_t *out, int type) {
    d->type = type;
    d->input = x->sizes[1];
    return cudnnGetRNNWeightSpaceSize(handle, d, out);
}
EXPORT int cudnnGetRNNLinLayerMatrixParams(void *handle, descriptor *d, int pseudo, const descriptor *x, void *weights,
                                           char *space, int gate, descriptor *matrix, char **at) {
    (void)weights;
    d->input = x->sizes[1];
    return cudnnGetRNNWeightParams(handle, d, pseudo, 0, space, gate, matrix, at, NULL, NULL);
}
EXPORT int cudnnGetRNNLinLayerBiasParams(void *handle, descriptor *d, int pseudo, const descriptor *x, void *weights,
                                         char *space, int gate, descriptor *bias, char **at) {
    (void)weights;
    d->input = x->sizes[1];
    return cudnnGetRNNWeightParams(handle, d, pseudo, 0, space, gate, NULL, NULL, bias, at);
}
EXPORT int cudnnGetFilterNdDescriptor(const descriptor *d, int room, int *type, int *layout, int *rank, int *sizes) {
    int strides[8];
    *layout = 0;
    return cudnnGetTensorNdDescriptor(d, room < 8 ? room : 8, type, rank, sizes, strides);
}
static int sequence_size(const descriptor *d, int length, descriptor *const *x, int times, size_t *out) {
    size_t step = (size_t)x[0]->sizes[0] * (size_t)d->hidden * gates(d) * (size_t)d->directions * size_of(d->type);
    *out = step * (size_t)length * (size_t)times;
    return 0;
}
EXPORT int cudnnGetRNNWorkspaceSize(void *handle, const descriptor *d, int length, descriptor *const *x, size_t *out) {
    (void)handle;
    return sequence_size(d, length, x, 2, out);
}
EXPORT int cudnnGetRNNTrainingReserveSize(void *handle, const descriptor *d, int length, descriptor *const *x, size_t *out) {
    (void)handle;
    return sequence_size(d, length, x, 3 * d->layers, out);
}
