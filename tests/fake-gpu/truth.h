/* Journal of the machine's memory (README.md gives the line format). All functions need the machine's lock. */
#ifndef SIM_TRUTH_H
#define SIM_TRUTH_H

#include "machine.h"

int truth_wanted(const sim_machine *m);
void truth_begin(void);
/* One process on one device; slot -1: no tags. */
void truth_put(const sim_machine *m, uint64_t t, const char *device, const char *call, uint32_t pid,
               const sim_usage *u, int slot, int d);
/* Writes everything added since truth_begin. */
void truth_write(const sim_machine *m);

#endif
