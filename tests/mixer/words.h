/* Commands: one a line on standard input, one answer a line: the driver's result, the time before and after the call
 * (CLOCK_MONOTONIC ns), a number, a text. */
#ifndef MIXER_WORDS_H
#define MIXER_WORDS_H

#include <stdint.h>

typedef struct {
    const char *name;
    int (*run)(void); /* the driver's result */
} command;
extern const command memory_words[], sharing_words[], end_words[];
int brief_life(uint64_t calls); /* runs a short program and returns its status */

const char *word(void);            /* the next of the line, "" at its end */
uint64_t number(void);             /* 7, 4K, 2M, 1G, 0xff, or what a name stands for */
uint64_t *named(const char *name); /* where the value of a name is kept */
uint64_t *new_name(void);          /* of the next word; 0 from now on */
void *handle(void);                /* number() as the driver's own */
void say_number(uint64_t value);   /* in the answer */
void say_sealed(const void *bytes);
void read_sealed(void *bytes);

extern int device;           /* ordinal in use */
extern _Thread_local void *stream;
void *context_now(void);
void use_context(void *context);

#endif
