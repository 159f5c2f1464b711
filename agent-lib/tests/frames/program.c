/* A Python thread that runs without the GIL until the process ends. */
#include <stdint.h>
volatile uint64_t calls, last;
void work(uint64_t (*here)(char *, uint64_t)) {
    char room[4096];
    for (;;) {
        last = here(room, sizeof room);
        calls++;
    }
}
