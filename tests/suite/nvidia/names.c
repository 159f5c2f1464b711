/* What the libcupti in the first word calls the driver's functions with the callback ids in the others. Needs a loaded libcuda: without
 * one, newer versions of libcupti answer nothing. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **words) {
    dlopen("libcuda.so.1", RTLD_NOW);
    void *cupti = dlopen(words[1], RTLD_NOW);
    unsigned (*name_of)(unsigned, unsigned, const char **) =
        cupti ? (unsigned (*)(unsigned, unsigned, const char **))dlsym(cupti, "cuptiGetCallbackName") : NULL;
    if (!name_of) return 1;
    for (int i = 2; i < count; i++) {
        const char *name = "";
        unsigned result = name_of(1, (unsigned)atoi(words[i]), &name);
        printf("%s %u %s\n", words[i], result, result ? "" : name);
    }
    return 0;
}
