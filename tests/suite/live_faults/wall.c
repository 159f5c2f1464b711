/* A wall clock that is ahead by the number of seconds in the file GPUMEM_TEST_WALL. Other clocks are unchanged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (__typeof__(real))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    const char *path = getenv("GPUMEM_TEST_WALL");
    char text[32] = "";
    int file;
    if (clock != CLOCK_REALTIME || !path || (file = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return result;
    if (read(file, text, sizeof text - 1) > 0)
        now->tv_sec += atol(text);
    close(file);
    return result;
}
