/* NVIDIA's libraries leave thread-specific data with a destructor behind in every thread that calls them, and never delete its key.
 * If such a library is unloaded while the thread lives, the program crashes when the thread ends: the destructor is gone. */
#ifndef SIM_THREAD_DATA_H
#define SIM_THREAD_DATA_H

#include <pthread.h>

static pthread_key_t thread_data;
static void forget_thread_data(void *unused) { (void)unused; }
static void make_thread_data(void) { pthread_key_create(&thread_data, forget_thread_data); }

static void leave_thread_data(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_thread_data);
    pthread_setspecific(thread_data, &thread_data);
}

#endif
