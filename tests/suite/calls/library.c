/* A library whose function NAME allocates with ALLOCATE. */
#include <stddef.h>
#include <stdint.h>

int ALLOCATE(uint64_t *out, size_t bytes);
int NAME(uint64_t *out, size_t bytes);

static volatile int calls;

int NAME(uint64_t *out, size_t bytes) {
    int result = ALLOCATE(out, bytes);
    calls = calls + 1; /* no jump instead of a call */
    return result;
}
