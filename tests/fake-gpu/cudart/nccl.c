/* NCCL: nobody is on the other side, and whatever is begun is done. */
#define EXPORT __attribute__((visibility("default")))

/* PyTorch 2.7 and 2.8 wait at the end until this says so. */
EXPORT int ncclCommGetAsyncError(void *communicator, int *state) {
    (void)communicator;
    *state = 0;
    return 0;
}
