"""The same in Python, for a program that allocates by itself; of PyTorch's tensors the agent knows more by itself.

    gpumemctl run -- python3 train.py
"""

import ctypes

import gpumem

MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")


def must(result: int) -> None:
    if result:
        raise RuntimeError("CUDA error {}".format(result))


def begin() -> None:
    context = ctypes.c_void_p()
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))


def alloc(size: int) -> int:
    address = ctypes.c_uint64()
    must(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    return address.value


def free(address: int) -> None:
    must(cuda.cuMemFree_v2(ctypes.c_uint64(address)))


def main() -> None:
    begin()
    gpumem.configure("ranges", True)  # how often and how long each scope was open, too
    layers = []
    with gpumem.scope("model"):
        for number in range(3):
            with gpumem.scope("layer.{}".format(number)):
                layers.append(alloc(8 * MIB))
                gpumem.retag(layers[-1], role="parameter")
    for step in range(1, 5):
        gpumem.step(step)
        with gpumem.scope("activations"):
            free(alloc(6 * MIB))
        gpumem.counter("samples", 32 * step)
    print(gpumem.report(by="tag", all=1))
    for address in layers:
        free(address)


if __name__ == "__main__":
    main()
