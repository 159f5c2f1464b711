/* Shared by the two programs host_main.c and host_cxx.cpp. See host_main.c. */
#ifndef TRAINER_HOST_H
#define TRAINER_HOST_H

#ifdef __cplusplus
extern "C" {
#endif

void open_gpu(void);              /* loads the driver and takes the device's context */
void use_gpu(void);               /* this thread's, too */
void work(int rounds);            /* allocates and frees memory under names; ends the program when the driver refuses */
unsigned long long take_bytes(unsigned long long bytes); /* device memory; 0 when there is none */
void give_back(unsigned long long address);
void nap(int ms);                 /* long enough for the agent's thread to run; signals do not shorten it */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void view(void);                  /* prints the program's view of its own state */

typedef struct {
    const char *name;
    int (*run)(void);
} habit;
extern const habit families[], limits[]; /* host_family.c, host_limits.c */

#ifdef __cplusplus
}
#endif
#endif
