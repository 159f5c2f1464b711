/* An interpreter that was linked for another main() becomes `python`: loaded with it, this is asked to start the program. */
#define _GNU_SOURCE
#include <dlfcn.h>

typedef int Main(int, char **, char **);
typedef void Step(void);
typedef int Start(Main *, int, char **, Step *, Step *, Step *, void *);

int Py_BytesMain(int count, char **arguments);

static int python(int count, char **arguments, char **environment) {
    (void)environment;
    return Py_BytesMain(count, arguments);
}

int __libc_start_main(Main *other, int count, char **arguments, Step *before, Step *after, Step *end, void *stack) {
    Start *start = (Start *)dlsym(RTLD_NEXT, "__libc_start_main");
    (void)other;
    return start(python, count, arguments, before, after, end, stack);
}
