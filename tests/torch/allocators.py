"""Trains in each mode of torch's allocators that the command line names, and checks after every step."""

import ctypes
import os
import subprocess
import sys

import torch
from models import gpt
from said import check, say


def train(name, steps=3, device="cuda"):
    model, loss = gpt(device, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss().backward()
        optimizer.step()
        check(f"{name}/{step}")
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    check(f"{name}/end")


def native():
    train("native")
    torch.cuda.empty_cache()
    check("native/emptied")


def two_devices():
    train("second", 2, "cuda:1")
    check("second/gone")


def expandable():
    try:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    except RuntimeError as error:  # before 2.1
        return say(skipped=f"expandable: {error}")
    train("expandable")
    torch.cuda.empty_cache()
    check("expandable/emptied")
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def graph():
    x = torch.zeros(64, 1024, device="cuda")
    linear = torch.nn.Linear(1024, 1024).cuda()
    linear(x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = torch.relu(linear(x))
    check("graph/captured")
    for _ in range(2):
        captured.replay()
    torch.cuda.synchronize()
    check("graph/replayed")
    del y
    check("graph/result gone")
    del captured
    check("graph/gone")


def mempool():
    if not hasattr(torch.cuda, "MemPool"):
        return say(skipped="mempool")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (1, 5, 30)]
    check("mempool/full")
    del kept[1]
    check("mempool/less")
    del kept, pool
    check("mempool/gone")


def plugged():
    return torch.cuda.memory.CUDAPluggableAllocator(os.environ["PLUGGABLE"], "plug_malloc", "plug_free")


def pluggable_pool():
    if not hasattr(torch.cuda, "MemPool"):
        return say(skipped="pluggable_pool")
    allocator = plugged()
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
        more = torch.empty(5 << 10, dtype=torch.uint8, device="cuda")
    check("pluggable_pool/full")
    del kept, more
    check("pluggable_pool/gone")
    del pool  # before its allocator: PyTorch 2.8 ends with SIGSEGV otherwise


def record_stream():
    """A tensor that another stream still uses when Python frees it."""
    busy = lambda on: subprocess.run([os.environ["FAKE_GPU"], "set", os.environ["GPUMEM_SIM"], f"cuda.busy={on}"], check=True)
    stream = torch.cuda.Stream()
    used = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    busy(1)
    used.record_stream(stream)
    del used
    check("record_stream/pending")
    more = torch.empty(1 << 10, dtype=torch.uint8, device="cuda")
    check("record_stream/still pending")
    torch.cuda.synchronize()
    last = torch.empty(1 << 10, dtype=torch.uint8, device="cuda")
    check("record_stream/done")
    del more, last
    busy(0)


def asynchronous():
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    train("async")


def uncached():
    train("uncached", 2)


def pluggable():
    torch.cuda.memory.change_current_allocator(plugged())
    counted = ctypes.CDLL(os.environ["PLUGGABLE"]).plug_held
    counted.restype = ctypes.c_uint64
    model, loss = gpt(layers=2)
    for step in range(2):
        loss().backward()
        # torch has no statistics in this mode; the allocator counts itself.
        from said import mark

        mark(f"check pluggable/{step}")
        say(check=f"pluggable/{step}", devices=[{"held": counted()}])
        model.zero_grad()


for mode in sys.argv[1:]:
    globals()[mode]()
say(done=True)
