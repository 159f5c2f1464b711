/* A program that uses driver memory as commanded, or at random (soak.c):
 *     mixer < commands
 *     mixer brief CALLS
 *     mixer soak SEED CALLS THREADS DEVICES ROUNDS */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "names.h"
#include "soak.h"
#include "words.h"

#define NAMES 4096

static struct {
    char name[24];
    uint64_t value;
} names[NAMES];
static int name_count;

int device;
_Thread_local void *stream;
static _Thread_local char *at;
static _Thread_local uint64_t said_number;
static _Thread_local char said_text[129];
static _Thread_local void *context;

/* %1b5b, in place: bytes that a line of commands cannot have. */
static void decode(char *hex) {
    char *to = hex;
    unsigned byte;
    for (hex++; sscanf(hex, "%2x", &byte) == 1; hex += 2) *to++ = (char)byte;
    *to = 0;
}

const char *word(void) {
    while (*at == ' ') at++;
    char *found = at;
    at += strcspn(at, " ");
    if (*at) *at++ = 0;
    if (*found == '%') decode(found);
    return found;
}

uint64_t *named(const char *name) {
    for (int i = 0; i < name_count; i++)
        if (!strcmp(names[i].name, name)) return &names[i].value;
    if (name_count == NAMES || !*name) {
        fprintf(stderr, "mixer: a name is missing, or there are too many\n");
        exit(2);
    }
    snprintf(names[name_count].name, sizeof names->name, "%s", name);
    return &names[name_count++].value;
}

uint64_t *new_name(void) {
    uint64_t *value = named(word());
    *value = 0;
    return value;
}

uint64_t number(void) {
    const char *text = word();
    if (*text < '0' || *text > '9') return *named(text);
    char *end;
    uint64_t value = strtoull(text, &end, 0);
    const char *units = "KMG", *unit = *end ? strchr(units, *end) : NULL;
    return unit ? value << (10 * (unit - units + 1)) : value;
}

void *handle(void) { return (void *)(uintptr_t)number(); /* NOLINT: handles are numbers here */ }
void say_number(uint64_t value) { said_number = value; }

void say_sealed(const void *bytes) {
    for (int i = 0; i < 64; i++) sprintf(said_text + 2 * i, "%02x", ((const uint8_t *)bytes)[i]);
}
void read_sealed(void *bytes) {
    const char *text = word();
    for (int i = 0; i < 64; i++) {
        unsigned byte = 0;
        sscanf(text + 2 * i, "%2x", &byte);
        ((uint8_t *)bytes)[i] = (uint8_t)byte;
    }
}

void *context_now(void) { return context; }
void use_context(void *to) {
    context = to;
    cu.cuCtxSetCurrent(to);
}

static const command *find(const command *table, const char *name) {
    while (table->name && strcmp(table->name, name)) table++;
    return table->name ? table : NULL;
}

static char *run(const char *line) {
    char *mine = strdup(line), *answer = NULL;
    at = mine;
    const char *name = word();
    const command *found = find(memory_words, name);
    if (!found) found = find(sharing_words, name);
    if (!found) found = find(end_words, name);
    if (!found) {
        fprintf(stderr, "mixer: no such command: %s\n", name);
        exit(2);
    }
    said_number = 0;
    said_text[0] = 0;
    uint64_t before = now_ns();
    int result = found->run();
    uint64_t after = now_ns();
    if (asprintf(&answer, "%d %llu %llu %llu %s\n", result, (unsigned long long)before, (unsigned long long)after,
                 (unsigned long long)said_number, said_text) < 0)
        abort();
    free(mine);
    return answer;
}

/* `later COMMAND` answers at once; `join` answers what the command did, when it is over. */
static pthread_t helper;
static void *help_context;

static void *help(void *line) {
    use_context(help_context);
    void *answer = run(line);
    free(line);
    return answer;
}

int main(int argc, char **argv) {
    static char line[1 << 16];
    names_init(driver_load());
    int result = cu.cuInit(0);
    if (result) {
        fprintf(stderr, "mixer: cuInit: %d\n", result);
        return 4;
    }
    if (argc == 7 && !strcmp(argv[1], "soak"))
        return soak(strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]));
    if (argc == 3 && !strcmp(argv[1], "brief")) return brief_life(strtoull(argv[2], NULL, 0));
    if (argc > 1) {
        fprintf(stderr, "mixer < commands\nmixer brief CALLS\nmixer soak SEED CALLS THREADS DEVICES ROUNDS\n");
        return 2;
    }
    printf("ready pid=%d\n", (int)getpid());
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        char *answer = NULL;
        if (!strncmp(line, "later ", 6)) {
            help_context = context;
            if (pthread_create(&helper, NULL, help, strdup(line + 6))) abort();
            answer = strdup("0 0 0 0 \n");
        } else if (!strcmp(line, "join")) {
            pthread_join(helper, (void **)&answer);
        } else {
            answer = run(line);
        }
        fputs(answer, stdout);
        fflush(stdout);
        free(answer);
    }
    return 0;
}
