/* Replaces NVIDIA's NVTX headers: the documented handshake with an injection library, and calls through the tables that it
 * filled. Written from the documentation; it contains no code of NVIDIA's.
 *
 * VERSION2: like the older libnvToolsExt, with one function less and no version table. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <wchar.h>

enum { CORE = 1, CORE2 = 5 };
#ifdef VERSION2
enum { CORE_SIZE = 16, CORE2_SIZE = 15 };
#else
enum { CORE_SIZE = 16, CORE2_SIZE = 16 };
#endif

typedef void (*function)(void);
struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
};

static function core[CORE_SIZE], core2[CORE2_SIZE];
/* Each table has one place more than it offers, which must stay unwritten. */
static function *core_table[CORE_SIZE + 1], *core2_table[CORE2_SIZE + 1];
static int state; /* 0 fresh, 1 injected, 2 without */
static uint32_t told_version;
int inits;

static int get_module(uint32_t module, function ***table, uint32_t *count) {
    if (module == CORE) {
        *table = core_table;
        *count = CORE_SIZE;
        return 1;
    }
    if (module == CORE2) {
        *table = core2_table;
        *count = CORE2_SIZE;
        return 1;
    }
    return 0;
}
static struct {
    size_t size;
    int (*get)(uint32_t, function ***, uint32_t *);
} callbacks = {sizeof callbacks, get_module};

#ifndef VERSION2
static void set_version(uint32_t version) { told_version = version; }
static struct {
    size_t size;
    uint32_t version, reserved;
    void (*set)(uint32_t);
} versions = {sizeof versions, 3, 0, set_version};
#endif

static const void *get_table(uint32_t id) {
#ifndef VERSION2
    if (id == 3) return &versions;
#endif
    return id == 1 ? (const void *)&callbacks : NULL;
}

static void start(void) {
    const char *path = getenv("NVTX_INJECTION64_PATH");
    void *library = path != NULL ? dlopen(path, RTLD_LAZY) : NULL;
    int (*initialize)(const void *(*)(uint32_t)) = NULL;
    int i;
    for (i = 0; i < CORE_SIZE; i++) core_table[i] = &core[i];
    for (i = 0; i < CORE2_SIZE; i++) core2_table[i] = &core2[i];
    state = 2;
    if (library == NULL) return;
    initialize = (int (*)(const void *(*)(uint32_t)))dlsym(library, "InitializeInjectionNvtx2");
    inits++;
    if (initialize != NULL && initialize(get_table)) state = 1;
    else dlclose(library);
}
static function of(function *table, int id) {
    if (state == 0) start();
    return state == 1 ? table[id] : NULL;
}

#define CALL(table, id, type, absent, ...)                                   \
    function found = of(table, id);                                          \
    return found != NULL ? ((type)found)(__VA_ARGS__) : absent

int is_injected(void) {
    of(core, 1);
    return state == 1;
}
uint32_t version_told(void) { return told_version; }

int nvtxRangePushA(const char *text) { CALL(core, 9, int (*)(const char *), -2, text); }
int nvtxRangePushW(const wchar_t *text) { CALL(core, 10, int (*)(const wchar_t *), -2, text); }
int nvtxRangePop(void) { CALL(core, 11, int (*)(void), -2); }
void nvtxMarkA(const char *text) {
    function found = of(core, 2);
    if (found != NULL) ((void (*)(const char *))found)(text);
}
uint64_t nvtxRangeStartA(const char *text) { CALL(core, 5, uint64_t (*)(const char *), 0, text); }
void nvtxRangeEnd(uint64_t id) {
    function found = of(core, 7);
    if (found != NULL) ((void (*)(uint64_t))found)(id);
}
void *nvtxDomainCreateA(const char *name) { CALL(core2, 12, void *(*)(const char *), NULL, name); }
void *nvtxDomainCreateW(const wchar_t *name) { CALL(core2, 13, void *(*)(const wchar_t *), NULL, name); }
void *nvtxDomainRegisterStringA(void *domain, const char *text) {
    CALL(core2, 10, void *(*)(void *, const char *), NULL, domain, text);
}
int nvtxDomainRangePushEx(void *domain, const struct attributes *event) {
    CALL(core2, 4, int (*)(void *, const struct attributes *), -2, domain, event);
}
int nvtxDomainRangePop(void *domain) { CALL(core2, 5, int (*)(void *), -2, domain); }

/* An event of that size, with a text or a registered string. */
int push_event(void *domain, uint16_t size, int32_t type, const void *message) {
    struct attributes event = {3, 0, 0, 0, 0, 0, 0, 0, 0, NULL};
    event.size = size;
    event.message_type = type;
    event.message = message;
    return nvtxDomainRangePushEx(domain, &event);
}

/* For the bench: that many pairs. */
void push_pop_registered(const char *text, int pairs) {
    void *message = nvtxDomainRegisterStringA(NULL, text);
    for (; pairs > 0; pairs--) {
        push_event(NULL, 48, 3, message);
        nvtxDomainRangePop(NULL);
    }
}

void push_pop(const char *text, int pairs) {
    for (; pairs > 0; pairs--) {
        nvtxRangePushA(text);
        nvtxRangePop();
    }
}
