/* Another tool's injection library: appends one byte for each call to the file $COUNTER_OUT. $COUNTER_SUBSCRIBE: takes
 * the CUPTI subscription under that name and keeps it. $COUNTER_RETURN: its result (1). */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static void on_call(void *user, uint32_t domain, uint32_t id, const void *data) {
    (void)user, (void)domain, (void)id, (void)data;
}

static void subscribe(const char *name) {
    const struct {
        size_t size;
        const char *name;
        char *old_name;
        size_t old_size;
        uint8_t multi;
    } params = {32, name, NULL, 0, 0};
    static void *subscriber;
    uint32_t (*v2)(void **, void *, void *, const void *) = NULL;
    uint32_t (*v1)(void **, void *, void *) = NULL;
    void *library = dlopen("libcupti.so.13", RTLD_NOW);
    if (!library) return;
    *(void **)&v2 = dlsym(library, "cuptiSubscribe_v2");
    *(void **)&v1 = dlsym(library, "cuptiSubscribe");
    void *call = (void *)(uintptr_t)on_call;
    if (v2)
        v2(&subscriber, call, NULL, &params);
    else if (v1)
        v1(&subscriber, call, NULL);
}

int InitializeInjection(void) {
    const char *path = getenv("COUNTER_OUT"), *name = getenv("COUNTER_SUBSCRIBE"), *back = getenv("COUNTER_RETURN");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd >= 0) {
        if (write(fd, "*", 1) != 1) return 1;
        close(fd);
    }
    if (name) subscribe(name);
    return back ? atoi(back) : 1;
}
