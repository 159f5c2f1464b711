"""Runs out of memory at a place that the argument selects, and ends with the error.

    backward     a node of the backward pass, on the engine's own thread
    library      a tensor that deep calls of the standard library copy
    extension    a driver call outside of PyTorch, which kept memory before
    optimizer    the optimizer's state, after a failure that a flush repaired

The lines that fail are marked in this file.
"""

import copy
import ctypes
import inspect
import sys

import torch
from torch import nn
from torch.nn import functional as F
from waiting import wait_for_frames

GIB = 1 << 30
SOURCE = inspect.getsource(sys.modules[__name__]).splitlines()


def backward():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 128_000)).cuda()
    output = model(torch.randn(12_000, 1024, device="cuda"))
    loss = F.cross_entropy(output, torch.zeros(12_000, dtype=torch.long, device="cuda"))
    loss.backward()  # backward


class Deep:
    """An object at the end of a chain: `copy.deepcopy` calls itself many times before it reaches the tensor."""

    def __init__(self, value, depth):
        self.value = Deep(value, depth - 1) if depth else value


def library():
    held = Deep(torch.empty(10 * GIB, dtype=torch.uint8, device="cuda"), 30)
    copy.deepcopy(held)  # library


def extension():
    driver = ctypes.CDLL("libcuda.so.1")
    nn.Linear(8, 8).cuda()(torch.randn(8, 8, device="cuda"))
    while True:
        pointer = ctypes.c_uint64()
        result = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(GIB // 2))  # extension
        if result != 0:
            raise MemoryError(f"cuMemAlloc: {result}")


def optimizer():
    with torch.device("cuda"):
        model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(20)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 8192, device="cuda")).sum().backward()
    optimizer.step()  # optimizer


if __name__ == "__main__":
    torch.empty(1, device="cuda")
    wait_for_frames()
    place = sys.argv[1]
    print(next(number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {place}")), flush=True)
    globals()[place]()
