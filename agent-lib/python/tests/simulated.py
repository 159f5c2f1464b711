"""Shared by tests on the simulated GPU. Does not import gpumem, because some tests start without it."""

#: Source code with a few driver calls, for programs that tests start.
DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def begin():
    assert cuda.cuInit(0) == 0
    context = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
def take(size):
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    return address.value
def give(address):
    assert cuda.cuMemFree_v2(ctypes.c_uint64(address)) == 0
"""
