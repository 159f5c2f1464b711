// Asks the driver for memory in functions that have names, and gives it no name itself. Built by tests/suite/sites.rs.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

static int (*allocate)(uint64_t *, size_t);

template <class F> static F must(void *driver, const char *name) {
    F found = reinterpret_cast<F>(dlsym(driver, name));
    if (!found) exit(2);
    return found;
}

static inline void ask(size_t mib, uint64_t *address) __attribute__((always_inline));
static inline void ask(size_t mib, uint64_t *address) {
    if (allocate(address, mib << 20)) exit(3);
}

namespace model {
__attribute__((noinline)) void load(const char *, uint64_t *at) {
    ask(8, at);
    ask(8, at + 1);
}
class Cache {
  public:
    __attribute__((noinline)) void grow(uint64_t *at) { ask(4, at); }
};
} // namespace model

extern "C" __attribute__((noinline)) void scratch(uint64_t *at) { ask(2, at); }

int main() {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return 2;
    void *context = nullptr;
    auto init = must<int (*)(unsigned)>(driver, "cuInit");
    auto retain = must<int (*)(void **, int)>(driver, "cuDevicePrimaryCtxRetain");
    auto set = must<int (*)(void *)>(driver, "cuCtxSetCurrent");
    auto give = must<int (*)(uint64_t)>(driver, "cuMemFree_v2");
    allocate = must<int (*)(uint64_t *, size_t)>(driver, "cuMemAlloc_v2");
    if (init(0) || retain(&context, 0) || set(context)) return 3;
    uint64_t at[4], gone = 0;
    model::load("weights", at);
    model::Cache().grow(at + 2);
    scratch(at + 3);
    for (int round = 0; round < 200; round++) { // mostly freed before they can be named
        scratch(&gone);
        if (give(gone)) return 4;
    }
    puts("ready");
    fflush(stdout);
    getchar();
    return 0;
}
