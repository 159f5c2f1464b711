/* The truth journal: a line is composed completely and written with one call, under the machine's lock. */
#include "truth.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *line;
static size_t line_length, line_room;

__attribute__((format(printf, 1, 2))) static void put(const char *format, ...) {
    for (;;) {
        va_list arguments;
        va_start(arguments, format);
        int length = vsnprintf(line + line_length, line_room - line_length, format, arguments);
        va_end(arguments);
        if (line && length >= 0 && line_length + (size_t)length < line_room) {
            line_length += (size_t)length;
            return;
        }
        line_room = line_room ? line_room * 2 : 65536;
        line = realloc(line, line_room);
        if (!line) abort();
    }
}

static void put_text(const char *text) {
    put("\"");
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            put("\\%c", *text);
        else if ((unsigned char)*text < 32)
            put("\\u%04x", (unsigned)*text);
        else
            put("%c", *text);
    }
    put("\"");
}

void truth_put(const sim_machine *machine, uint64_t t, const char *device, const char *call, uint32_t pid,
               const sim_usage *u, int slot, int d) {
    typedef unsigned long long llu;
    put("{\"t\":%llu,\"list\":%llu,\"call\":\"%s\",\"device\":\"%s\",\"pid\":%u,\"used\":%llu,\"context\":%llu,"
        "\"modules\":%llu,\"local\":%llu,\"heaps\":%llu,\"other\":%llu,\"rounding\":%llu,\"tracked\":%llu,\"idle\":%llu,\"tags\":{",
        (llu)t, (llu)machine->lists, call, device, pid, (llu)sim_listed(u), (llu)u->context_bytes,
        (llu)u->module_bytes, (llu)u->local_bytes, (llu)u->heaps_bytes,
        (llu)(u->internal_bytes + u->other_bytes + u->import_charged_bytes), (llu)u->rounding_bytes,
        (llu)u->tracked_bytes, (llu)u->idle_bytes);
    const char *comma = "";
    for (uint32_t i = 0; slot >= 0 && i < machine->slot[slot].tag_count; i++) {
        int64_t bytes = machine->tags[slot].bytes[d][i];
        if (!bytes) continue;
        put("%s", comma);
        put_text(machine->tags[slot].name[i]);
        put(":%lld", (long long)bytes);
        comma = ",";
    }
    put("},\"beside\":{\"managed\":%llu,\"pinned\":%llu,\"imported\":%llu}}\n", (llu)u->managed_bytes,
        (llu)u->pinned_bytes, (llu)u->imported_bytes);
}

void truth_begin(void) { line_length = 0; }

/* Opened once by name; another name opens another file. */
void truth_write(const sim_machine *machine) {
    static char open_name[512];
    static int fd = -1;
    if (!line_length) return;
    const char *name = getenv("GPUMEM_SIM_TRUTH");
    if (!name || !*name) name = machine->truth;
    if (fd < 0 || strcmp(name, open_name)) {
        if (fd >= 0) close(fd);
        snprintf(open_name, sizeof open_name, "%s", name);
        fd = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    }
    for (size_t done = 0; fd >= 0 && done < line_length;) {
        ssize_t n = write(fd, line + done, line_length - done);
        if (n < 0 && errno != EINTR) break;
        done += n > 0 ? (size_t)n : 0;
    }
}

int truth_wanted(const sim_machine *machine) {
    const char *name = getenv("GPUMEM_SIM_TRUTH");
    return (name && *name) || machine->truth[0];
}
