"""A stand-in for the parts of PyTorch that the agent's code reads, in pure Python, so that it runs in every CPython. Its
autograd nodes are those of libtorch_cpu.cpp, as floats: a float's value, where a node has its address, is its number.
"""

import ctypes
import os
import struct

_engine = ctypes.CDLL(os.environ["TORCH_CPU"])
for _name in ("make_node", "make_addition", "make_accumulate"):
    getattr(_engine, _name).restype = ctypes.c_uint64
    getattr(_engine, _name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_engine.run_node.argtypes = [ctypes.c_uint64]

float32 = "float32"


class _Node(float):
    @classmethod
    def of(cls, make):
        node = make(None, None)
        made = cls(struct.unpack("d", struct.pack("Q", node))[0])
        made.address = node
        return made

    @property
    def next_functions(self):
        return ((_Node.of(_engine.make_accumulate), 0),)


class Tensor:
    is_cuda = True

    def __init__(self, address=0, grad_fn=None, requires_grad=False):
        self.address, self.grad_fn, self.requires_grad, self.is_leaf, self.grad = address, grad_fn, requires_grad, True, None

    def untyped_storage(self):
        return self

    def data_ptr(self):
        return self.address

    def __mul__(self, other):
        return Tensor(grad_fn=_Node.of(_engine.make_node))

    def add_(self, other):
        self.grad_fn = _Node.of(_engine.make_addition)
        return self

    def backward(self):
        _engine.run_node(self.grad_fn.address)


def zeros(*_, **__):
    return Tensor()


class _Mode:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


inference_mode = enable_grad = _Mode


class _C:
    DisableTorchFunction = DisableTorchFunctionSubclass = _Mode

    @staticmethod
    def _len_torch_function_stack():
        return 1  # set_default_device was called


from . import autograd, nn, optim  # noqa: E402, F401
