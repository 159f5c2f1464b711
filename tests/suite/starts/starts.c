/* Calls cuInit in the place that the first argument names, and prints its result:
 *   main     on the first thread
 *   worker   on a thread that ends before the program does
 *   lives    on the first thread; the program runs until its input ends
 *   fork     in a child, then in the parent
 *   early    on the first thread, with the libcupti of $EARLY loaded before, as `import torch` does it */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void *init(void *unused) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*cuInit)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
    if (cuInit)
        printf("cuInit %d\n", cuInit(0));
    else
        printf("no driver: %s\n", dlerror());
    fflush(stdout);
    return unused;
}

int main(int count, char **words) {
    const char *where = count > 1 ? words[1] : "";
    if (!strcmp(where, "worker")) {
        pthread_t thread;
        pthread_create(&thread, NULL, init, NULL);
        pthread_join(thread, NULL);
        return 0;
    }
    if (!strcmp(where, "fork")) {
        int status = 0;
        if (!fork()) {
            init(NULL);
            exit(0);
        }
        wait(&status);
        printf("child ended with %d\n", status);
    }
    if (!strcmp(where, "early") && !dlopen(getenv("EARLY"), RTLD_NOW | RTLD_GLOBAL)) printf("not loaded: %s\n", dlerror());
    init(NULL);
    if (!strcmp(where, "lives"))
        while (getchar() != EOF) continue;
    return 0;
}
