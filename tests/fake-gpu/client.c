/* A program with a second CUPTI client, as a profiler has. It reads one command per line from standard input, and prints
 * one line for each:
 *
 *   init                  cuInit, and a current context              -> init RESULT
 *   alloc NAME MIB        cuMemAlloc under the tag NAME              -> alloc ADDRESS
 *   free NAME                                                        -> free RESULT
 *   subscribe [NAME]      as this client; v2 where there is one      -> subscribe RESULT [who has it]
 *   join [NAME]           the same, and others may be there          -> subscribe RESULT [who has it]
 *   seen                  callbacks that this client got             -> seen N
 *   unsubscribe                                                      -> unsubscribe RESULT
 *   finalize              cuptiUnsubscribe, cuptiFinalize            -> finalize RESULT
 *   pause, resume         gpumem's                                   -> pause, resume
 *   available             whether the agent is there                 -> available 1
 *   step                  a record that needs no CUPTI               -> step
 *
 * $CLIENT_CUPTI: its libcupti (libcupti.so.12), loaded at once, as a framework's is. The end of the input ends it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../agent-lib/include/gpumem.h"

typedef void callback(void *, uint32_t, uint32_t, const void *);
typedef struct {
    size_t size;
    const char *name;
    char *old_name;
    size_t old_size;
    uint8_t multi;
} subscriber_params;

static void *cuda, *cupti, *subscriber;
static unsigned long long seen;
static struct {
    char name[64];
    uint64_t address;
} blocks[64];

static void on_call(void *user, uint32_t domain, uint32_t id, const void *data) {
    (void)user, (void)domain, (void)id, (void)data;
    __atomic_add_fetch(&seen, 1, __ATOMIC_RELAXED);
}

/* Returns the function of that name; ends the program with a message if there is none. */
static void *find(void *library, const char *name) {
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        printf("missing %s\n", name);
        exit(2);
    }
    return found;
}
#define FIND(type, function, library, name) \
    type;                                   \
    *(void **)&function = find(library, name)

static uint32_t init(void) {
    int device = 0;
    void *context = NULL;
    FIND(uint32_t (*start)(unsigned), start, cuda, "cuInit");
    FIND(uint32_t (*retain)(void **, int), retain, cuda, "cuDevicePrimaryCtxRetain");
    FIND(uint32_t (*set)(void *), set, cuda, "cuCtxSetCurrent");
    uint32_t result = start(0);
    if (!result) result = retain(&context, device);
    return result ? result : set(context);
}

static uint64_t allocate(const char *name, size_t mib) {
    uint64_t address = 0;
    FIND(uint32_t (*alloc)(uint64_t *, size_t), alloc, cuda, "cuMemAlloc_v2");
    gpumem_push(name);
    if (alloc(&address, mib << 20)) address = 0;
    gpumem_pop();
    for (size_t i = 0; address && i < sizeof blocks / sizeof *blocks; i++)
        if (!blocks[i].address) {
            snprintf(blocks[i].name, sizeof blocks[i].name, "%s", name);
            blocks[i].address = address;
            break;
        }
    return address;
}

static uint32_t give_back(const char *name) {
    FIND(uint32_t (*release)(uint64_t), release, cuda, "cuMemFree_v2");
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        if (blocks[i].address && !strcmp(blocks[i].name, name)) {
            uint64_t address = blocks[i].address;
            blocks[i].address = 0;
            return release(address);
        }
    return 1;
}

static uint32_t subscribe(const char *name, int multi, char *holder, size_t room) {
    uint32_t (*v2)(void **, callback *, void *, subscriber_params *) = NULL;
    FIND(uint32_t (*v1)(void **, callback *, void *), v1, cupti, "cuptiSubscribe");
    FIND(uint32_t (*enable)(uint32_t, void *, uint32_t, uint32_t), enable, cupti, "cuptiEnableCallback");
    *(void **)&v2 = dlsym(cupti, "cuptiSubscribe_v2");
    subscriber_params params = {multi ? 40 : 32, name, holder, room, (uint8_t)multi};
    uint32_t result = v2 ? v2(&subscriber, on_call, NULL, &params) : v1(&subscriber, on_call, NULL);
    if (!result) enable(1, subscriber, 1, 243);
    return result;
}

static uint32_t leave(void) {
    FIND(uint32_t (*unsubscribe)(void *), unsubscribe, cupti, "cuptiUnsubscribe");
    void *mine = subscriber;
    subscriber = NULL;
    return mine ? unsubscribe(mine) : 0;
}

static void obey(const char *verb, const char *word, size_t number) {
    if (!strcmp(verb, "init")) {
        printf("init %u\n", init());
    } else if (!strcmp(verb, "alloc")) {
        printf("alloc %llx\n", (unsigned long long)allocate(word, number));
    } else if (!strcmp(verb, "free")) {
        printf("free %u\n", give_back(word));
    } else if (!strcmp(verb, "subscribe") || !strcmp(verb, "join")) {
        char holder[64] = "";
        uint32_t result = subscribe(*word ? word : NULL, *verb == 'j', holder, sizeof holder);
        printf("subscribe %u %s\n", result, holder);
    } else if (!strcmp(verb, "seen")) {
        printf("seen %llu\n", __atomic_load_n(&seen, __ATOMIC_RELAXED));
    } else if (!strcmp(verb, "unsubscribe")) {
        printf("unsubscribe %u\n", leave());
    } else if (!strcmp(verb, "finalize")) {
        FIND(uint32_t (*finalize)(void), finalize, cupti, "cuptiFinalize");
        leave();
        printf("finalize %u\n", finalize());
    } else if (!strcmp(verb, "pause")) {
        gpumem_pause();
        puts("pause");
    } else if (!strcmp(verb, "resume")) {
        gpumem_resume();
        puts("resume");
    } else if (!strcmp(verb, "available")) {
        printf("available %d\n", gpumem_available());
    } else if (!strcmp(verb, "step")) {
        gpumem_step(number);
        puts("step");
    } else {
        puts("init | alloc NAME MIB | free NAME | subscribe [NAME] | join [NAME] | seen | unsubscribe | finalize | "
             "pause | resume | available | step");
    }
    fflush(stdout);
}

int main(int count, char **words) {
    (void)words;
    const char *path = getenv("CLIENT_CUPTI");
    char line[256];
    cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    cupti = dlopen(path ? path : "libcupti.so.12", RTLD_NOW);
    if (count > 1) obey("help", "", 0);
    while (count == 1 && fgets(line, sizeof line, stdin)) {
        char verb[16] = "", word[64] = "";
        unsigned long number = 0;
        if (sscanf(line, "%15s %63s %lu", verb, word, &number) > 0) obey(verb, word, number);
    }
    return 0;
}
