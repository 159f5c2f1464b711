/* NCCL: there is no peer, and every operation completes at once. */
#define EXPORT __attribute__((visibility("default")))

/* PyTorch 2.7 and 2.8 wait at their end until this returns success. */
EXPORT int ncclCommGetAsyncError(void *communicator, int *state) {
    (void)communicator;
    *state = 0;
    return 0;
}
