/* A program that uses GPU memory as a training job does. Links no CUDA library. See README.md of ../fake-gpu. */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "tags.h"
#include "work.h"

options opt = {.seed = 1, .steps = 20, .step_ms = 10, .threads = 2, .race_loops = 20000, .device_count = 1};
device devices[DEVICES];
volatile int stop;

static void on_signal(int number) {
    (void)number;
    stop = 1;
}

static const char help[] =
    "trainer [options]\n"
    "  --steps N       training steps (20)            --step-ms M     pause after each (10)\n"
    "  --devices LIST  CUDA ordinals, by comma (0)    --seed N        of the sizes (1)\n"
    "  --threads N     helper threads, the first has no scopes (2)\n"
    "  --oom           ask for too much half-way, continue     --oom-fatal     exit with 1 then\n"
    "  --leak MIB      that much more with each step, until the device is full\n"
    "  --leak-modules  load a module with each step  --no-cache      keep nothing else from step to step\n"
    "  --race N        N threads take and give the same sizes after the steps\n"
    "  --race-loops N  that many times each (20000)\n"
    "  --pool-shrinks  let the driver's pool release free memory at each synchronisation (without an event)\n"
    "  --fork          fork a child after set-up      --hold SECONDS  stay with the memory at the end\n"
    "  --free          give everything back at the end --quiet        only `ready` and the last lines\n"
    "  --leave         main leaves with pthread_exit at the end\n";

static void parse(int argc, char **argv) {
    enum { STEPS = 1, STEP_MS, DEVICE_LIST, SEED, THREADS, OOM, OOM_FATAL, RACE, LOOPS, FORK, HOLD, FREE, QUIET, SHRINKS, LEAK, LEAVE, MODULES, NO_CACHE, HELP };
    static const struct option names[] = {
        {"steps", 1, 0, STEPS},    {"step-ms", 1, 0, STEP_MS}, {"devices", 1, 0, DEVICE_LIST}, {"seed", 1, 0, SEED},
        {"threads", 1, 0, THREADS}, {"oom", 0, 0, OOM},         {"oom-fatal", 0, 0, OOM_FATAL}, {"race", 1, 0, RACE},
        {"race-loops", 1, 0, LOOPS}, {"fork", 0, 0, FORK},      {"hold", 1, 0, HOLD},           {"free", 0, 0, FREE},
        {"quiet", 0, 0, QUIET},    {"pool-shrinks", 0, 0, SHRINKS}, {"leak", 1, 0, LEAK}, {"leave", 0, 0, LEAVE}, {"leak-modules", 0, 0, MODULES}, {"no-cache", 0, 0, NO_CACHE}, {"help", 0, 0, HELP},       {0, 0, 0, 0}};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) switch (c) {
        case STEPS: opt.steps = atoi(optarg); break;
        case STEP_MS: opt.step_ms = atoi(optarg); break;
        case SEED: opt.seed = strtoull(optarg, NULL, 0); break;
        case THREADS: opt.threads = atoi(optarg); break;
        case OOM: opt.oom = 1; break;
        case OOM_FATAL: opt.oom = opt.oom_fatal = 1; break;
        case RACE: opt.race = atoi(optarg); break;
        case LOOPS: opt.race_loops = atoi(optarg); break;
        case FORK: opt.fork_child = 1; break;
        case HOLD: opt.hold = atof(optarg); break;
        case FREE: opt.release = 1; break;
        case QUIET: opt.quiet = 1; break;
        case LEAK: opt.leak = strtoull(optarg, NULL, 0) * MIB; break;
        case SHRINKS: opt.pool_shrinks = 1; break;
        case LEAVE: opt.leave = 1; break;
        case MODULES: opt.leak_modules = 1; break;
        case NO_CACHE: opt.no_cache = 1; break;
        case HELP: fputs(help, stdout); exit(0);
        case DEVICE_LIST:
            opt.device_count = 0;
            for (char *word = strtok(optarg, ","); word && opt.device_count < DEVICES; word = strtok(NULL, ","))
                opt.devices[opt.device_count++] = atoi(word);
            break;
        default: fputs(help, stderr); exit(2);
        }
    if (optind < argc || !opt.device_count) {
        fputs(help, stderr);
        exit(2);
    }
}

static void pause_ms(double ms) {
    uint64_t end = now_ns() + (uint64_t)(ms * 1e6);
    for (uint64_t now; !stop && (now = now_ns()) < end;) {
        uint64_t left = end - now < 50000000 ? end - now : 50000000;
        struct timespec t = {0, (long)left};
        nanosleep(&t, NULL);
    }
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void report(uint64_t *took, int steps) {
    if (steps) {
        uint64_t sum = 0;
        for (int i = 0; i < steps; i++) sum += took[i];
        qsort(took, (size_t)steps, sizeof *took, by_size);
        printf("steps=%d mean_us=%.1f p50_us=%.1f p99_us=%.1f max_us=%.1f calls=%llu longest_call_us=%.1f\n", steps,
               (double)sum / steps / 1e3, (double)took[steps / 2] / 1e3, (double)took[(steps - 1) * 99 / 100] / 1e3,
               (double)took[steps - 1] / 1e3, (unsigned long long)calls, (double)longest_call_ns / 1e3);
    }
    for (int i = 0; i < opt.device_count; i++) {
        const device *d = &devices[i];
        printf("device=%d tracked=%llu peak=%llu direct=%llu vmm=%llu driver_pool=%llu pool_reserved=%llu "
               "pool_used=%llu\n", d->ordinal, (unsigned long long)tracked(d), (unsigned long long)d->peak,
               (unsigned long long)d->direct, (unsigned long long)d->vmm, (unsigned long long)d->driver_pool,
               (unsigned long long)d->pool.reserved, (unsigned long long)d->pool.used);
    }
    fflush(stdout);
}

static void say_ready(void) {
    printf("ready pid=%d\n", (int)getpid());
    fflush(stdout);
}

static void open_devices(void) {
    int count = 0;
    must(cu.cuInit(0), "cuInit");
    must(cu.cuDeviceGetCount(&count), "cuDeviceGetCount");
    for (int i = 0; i < opt.device_count; i++) {
        device *d = &devices[i];
        d->ordinal = opt.devices[i];
        pthread_mutex_init(&d->lock, NULL);
        must(cu.cuDevicePrimaryCtxRetain(&d->context, d->ordinal), "cuDevicePrimaryCtxRetain");
        set_up(d);
    }
}

int main(int argc, char **argv) {
    parse(argc, argv);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    void *library = load_driver();
    tags_init(library);
    open_devices();
    if (!opt.quiet) printf("gpumem %s\n", tags_available() ? "listens" : "is not there");
    if (opt.fork_child) try_fork();
    helpers_start(&devices[0], opt.threads);
    uint64_t *took = calloc((size_t)opt.steps + 1, sizeof *took);
    int done = 0;
    if (!opt.steps) say_ready();
    for (int step = 0; step < opt.steps && !stop; step++) {
        uint64_t begin = now_ns();
        step_is((uint64_t)step);
        helpers_take();
        for (int i = 0; i < opt.device_count; i++) train(&devices[i], step);
        if (opt.leak) leak(&devices[0]);
        if (opt.oom && !opt.leak && step == opt.steps / 2) run_out(&devices[0]);
        helpers_give();
        took[done++] = now_ns() - begin;
        if (step == 0) say_ready();
        pause_ms(opt.step_ms);
    }
    helpers_stop();
    if (opt.race && !stop) race(&devices[0]);
    mark("end of training");
    if (opt.release)
        for (int i = 0; i < opt.device_count; i++) tear_down(&devices[i]);
    report(took, done);
    free(took);
    if (opt.hold > 0) {
        if (!opt.quiet) printf("holding\n");
        fflush(stdout);
        pause_ms(opt.hold * 1e3);
    }
    if (opt.leave) pthread_exit(NULL);
    return 0;
}
