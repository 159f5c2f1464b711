// The same in C++: scopes end with their block, also when an exception leaves it.
//
//     c++ -I../agent-lib/include train.cpp -ldl -o train
//     gpumemctl run -- ./train
#include "cuda.h"
#include "gpumem.h"
#include <stdexcept>
#include <string>
#include <vector>

namespace {
const size_t MIB = size_t(1) << 20;

class Buffer {
  public:
    explicit Buffer(size_t bytes) : address_(cuda_alloc(bytes)) {}
    ~Buffer() { cu.cuMemFree_v2(address_); }
    uint64_t address() const { return address_; }

  private:
    Buffer(const Buffer &);
    Buffer &operator=(const Buffer &);
    uint64_t address_;
};

void forward(int step) {
    gpumem::scope here("activations");
    Buffer activations(6 * MIB);
    if (step == 3) throw std::runtime_error("a bad batch");
}
} // namespace

int main() {
    cuda_begin();
    std::vector<Buffer *> layers;
    {
        gpumem::scope model("model");
        for (int layer = 0; layer < 3; layer++) {
            gpumem::scope here(("layer." + std::to_string(layer)).c_str());
            layers.push_back(new Buffer(8 * MIB));
            gpumem_retag(0, layers.back()->address(), nullptr, GPUMEM_ROLE_PARAMETER, GPUMEM_PHASE_UNKNOWN);
        }
    }
    for (int step = 1; step <= 4; step++) {
        gpumem_step(uint64_t(step));
        try {
            forward(step);
        } catch (const std::exception &error) {
            gpumem_mark(error.what());
        }
    }
    Buffer untagged(MIB);
    char *report = gpumem_dumps("json", nullptr, 0, 0);
    if (report != nullptr) std::printf("%s", report);
    gpumem_free(report);
    for (Buffer *layer : layers) delete layer;
    return 0;
}
