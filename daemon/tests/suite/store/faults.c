/* Injects faults into reads and writes of the run store and its log; preloaded into the daemon. The file named by
 * GPUMEM_TEST_FAULT gives the error, for example "write ENOSPC" or "all EIO". While it holds "stand still", these calls do not
 * return. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_store(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strstr(path, "runs.sqlite") != NULL;
}

static void look(char *text, size_t room)
{
    const char *control = getenv("GPUMEM_TEST_FAULT");
    int told = control ? open(control, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t length = 0;
    if (told >= 0) {
        length = REAL(read)(told, text, room - 1);
        close(told);
    }
    text[length > 0 ? length : 0] = 0;
}

static int fault(int fd, int is_write)
{
    char text[32] = "";
    int kept = errno;
    if (is_store(fd))
        look(text, sizeof text);
    while (strncmp(text, "stand still", 11) == 0) {
        usleep(10000);
        look(text, sizeof text);
    }
    errno = kept;
    if (strncmp(text, "all", 3) != 0 && !(is_write && strncmp(text, "write", 5) == 0))
        return 0;
    errno = strstr(text, "ENOSPC") ? ENOSPC : EIO;
    return 1;
}

ssize_t write(int fd, const void *bytes, size_t count)
{
    return fault(fd, 1) ? -1 : REAL(write)(fd, bytes, count);
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t at)
{
    return fault(fd, 1) ? -1 : REAL(pwrite)(fd, bytes, count, at);
}

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t at)
{
    return fault(fd, 1) ? -1 : REAL(pwrite64)(fd, bytes, count, at);
}

ssize_t read(int fd, void *bytes, size_t count)
{
    return fault(fd, 0) ? -1 : REAL(read)(fd, bytes, count);
}

ssize_t pread(int fd, void *bytes, size_t count, off_t at)
{
    return fault(fd, 0) ? -1 : REAL(pread)(fd, bytes, count, at);
}

ssize_t pread64(int fd, void *bytes, size_t count, off64_t at)
{
    return fault(fd, 0) ? -1 : REAL(pread64)(fd, bytes, count, at);
}
