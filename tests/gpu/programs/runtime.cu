// A program of the runtime API. Its last line is one JSON object: live bytes by kind, allocating calls, ns of a launch.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

static long long calls;

static void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}
#define TAKE(call) (calls++, must(call, #call))
#define DO(call) must(call, #call)

__global__ void nothing() {}

// `runtime hold` waits for a line before it ends.
int main(int argc, char **) {
    long long device = 0, pitched = 0, managed = 0, pinned = 0, registered = 0, array = 0;
    void *p = nullptr;
    for (size_t bytes : {size_t(1), size_t(4096), size_t(3) << 20, size_t(20) << 20}) {
        TAKE(cudaMalloc(&p, bytes));
        device += (long long)bytes;
    }
    void *given_back = nullptr;
    TAKE(cudaMalloc(&given_back, size_t(64) << 20));
    DO(cudaFree(given_back));
    DO(cudaFree(nullptr));

    size_t pitch = 0;
    TAKE(cudaMallocPitch(&p, &pitch, 1000, 500));
    pitched += (long long)(pitch * 500);
    cudaPitchedPtr solid;
    TAKE(cudaMalloc3D(&solid, make_cudaExtent(100, 50, 20)));
    pitched += (long long)(solid.pitch * 50 * 20);

    cudaChannelFormatDesc format = cudaCreateChannelDesc<float4>();
    cudaArray_t flat, deep;
    TAKE(cudaMallocArray(&flat, &format, 512, 512));
    TAKE(cudaMalloc3DArray(&deep, &format, make_cudaExtent(64, 64, 16)));
    array += 512ll * 512 * 16 + 64ll * 64 * 16 * 16;

    TAKE(cudaMallocManaged(&p, size_t(2) << 20)); // small: never beyond what the card has free
    managed += 2 << 20;
    TAKE(cudaHostAlloc(&p, size_t(4) << 20, cudaHostAllocDefault));
    pinned += 4 << 20;
    TAKE(cudaMallocHost(&p, size_t(1) << 20));
    pinned += 1 << 20;
    void *own = std::aligned_alloc(1 << 16, size_t(2) << 20);
    TAKE(cudaHostRegister(own, size_t(2) << 20, cudaHostRegisterDefault));
    registered += 2 << 20;

    cudaStream_t stream;
    DO(cudaStreamCreate(&stream));
    TAKE(cudaMallocAsync(&p, size_t(8) << 20, stream));
    DO(cudaFreeAsync(p, stream));
    DO(cudaStreamSynchronize(stream));

    void *impossible = nullptr;
    if (cudaMalloc(&impossible, size_t(1) << 50) == cudaSuccess) return 2;
    cudaGetLastError();

    for (int i = 0; i < 1000; i++) nothing<<<1, 1>>>();
    DO(cudaDeviceSynchronize());
    const int launches = 20000;
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < launches; i++) nothing<<<1, 1>>>();
    DO(cudaDeviceSynchronize());
    double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / launches;
    std::printf("{\"device\":%lld,\"pitched\":%lld,\"managed\":%lld,\"pinned\":%lld,\"registered\":%lld,\"array\":%lld,"
                "\"calls\":%lld,\"launch_ns\":%.1f}\n",
                device, pitched, managed, pinned, registered, array, calls, ns);
    std::fflush(stdout);
    if (argc > 1) std::getchar();
    return 0;
}
