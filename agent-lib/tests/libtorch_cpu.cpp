// What libtorch_cpu.so has of autograd, as far as the agent looks at it: the counts of threads and nodes, nodes with both, and
// an engine that calls evaluate_function through its own slot. A node does what it is told, and may throw.
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace at {
static thread_local uint64_t next;
static thread_local uint64_t mine;
static uint64_t threads;
namespace sequence_number {
uint64_t peek() { return next; }
}
struct RecordFunction {
    static uint64_t currentThreadId();
};
uint64_t RecordFunction::currentThreadId() {
    return mine ? mine : mine = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
}
}

namespace torch {
namespace autograd {
struct GraphTask;
struct InputBuffer;
struct ReadyQueue;
typedef int work(void *);
struct Node {
    Node(uint64_t number, work *does, void *with) : number(number), does(does), with(with) {
        thread = at::RecordFunction::currentThreadId();
    }
    virtual ~Node() {}
    uint64_t references = 1;
    uint64_t number;
    uint64_t depth = 0;
    bool parent = false;
    uint64_t thread;
    work *does;
    void *with;
    uint64_t rest[8] = {};
};
struct Addition : Node {
    using Node::Node;
};
struct Engine {
    __attribute__((noinline)) void evaluate_function(
        std::shared_ptr<GraphTask> &, Node *node, InputBuffer &, const std::shared_ptr<ReadyQueue> &);
};
void Engine::evaluate_function(
    std::shared_ptr<GraphTask> &, Node *node, InputBuffer &, const std::shared_ptr<ReadyQueue> &) {
    if (node->does && node->does(node->with)) throw std::runtime_error("boom");
}
}
}

using namespace torch::autograd;

extern "C" Node *make_node(work *does, void *with) { return new Node(at::next++, does, with); }

extern "C" Node *make_addition(work *does, void *with) { return new Addition(at::next++, does, with); }

extern "C" Node *make_accumulate(work *does, void *with) { return new Node(UINT64_MAX, does, with); }

// 1 if the node threw.
extern "C" int run_node(Node *node) {
    static Engine engine;
    std::shared_ptr<GraphTask> task;
    std::shared_ptr<ReadyQueue> queue;
    try {
        engine.evaluate_function(task, node, *reinterpret_cast<InputBuffer *>(&engine), queue);
    } catch (const std::runtime_error &) {
        return 1;
    }
    return 0;
}
