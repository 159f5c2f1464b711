/* A library that allocates for itself, as NCCL does. */
#include <stddef.h>
#include <stdint.h>

int gaplib_take(int (*alloc)(uint64_t *, size_t), uint64_t *address, size_t bytes);

/* Using the result prevents a tail call, so the call returns into this library. */
int gaplib_take(int (*alloc)(uint64_t *, size_t), uint64_t *address, size_t bytes) {
    int result = alloc(address, bytes);
    return result ? -result : 0;
}

int gaplib_descend(int depth);

/* Returns `depth`, and leaves return addresses into this library on the unused part of the stack. */
int gaplib_descend(int depth) {
    volatile int room[16] = {depth};
    return depth ? gaplib_descend(depth - 1) + 1 : room[0];
}
