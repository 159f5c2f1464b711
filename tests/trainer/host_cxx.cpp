// Typical behaviour of a C++ program: exceptions, destructors of static and thread-local objects, with a GPU in all of
// them.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gpumem.h"
#include "host.h"

struct Buffer {
    unsigned long long address;
    std::string name;
    explicit Buffer(const char *of) : address(take_bytes(1 << 20)), name(of) {}
    ~Buffer() {
        give_back(address);
        say("gave back %s", name.c_str());
    }
};

// Made before main, and goes after it: when CUDA's own exit handlers have not run yet.
static struct Before {
    Before() { gpumem_push("before main"); }
    ~Before() {
        gpumem_pop();
        say("the last destructor");
    }
} before;
static Buffer *late;
static struct Late {
    ~Late() { say("a static object %s", late ? "goes" : "stays"); }
} last;

static void deep(int depth) {
    gpumem::scope scope("deep");
    Buffer buffer("a local one");
    if (depth == 0) throw std::runtime_error("thrown");
    deep(depth - 1);
}

static void run() {
    static Buffer lasting("a static one");
    late = &lasting;
    for (int i = 0; i < 20; i++) try {
            deep(i % 3);
        } catch (const std::runtime_error &error) {
            say("caught %s", error.what());
        }
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; i++)
        threads.emplace_back([] {
            use_gpu();
            thread_local Buffer own("a thread's own");
            work(5);
            try {
                deep(1);
            } catch (const std::exception &) {
            }
        });
    for (auto &thread : threads) thread.join();
    nap(20);
    work(10);
}

int main(int argc, char **argv) {
    open_gpu();
    run();
    view();
    std::string end = argc > 1 ? argv[1] : "";
    if (end == "terminate") throw std::runtime_error("nobody catches this");
    if (end == "exit") std::thread([] { std::exit(6); }).join();
    return 0;
}
