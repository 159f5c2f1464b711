"""A training in which PyTorch calls every function that an agent may intercept, for tests/suite/host.rs: blocks, events of
streams, the backward pass, memory that runs out. PyTorch's own profiler runs behind the agent and prints the calls that
reached it. The simulated GPU computes nothing: the numbers come from a model on the CPU."""

import os
import sys

os.environ["KINETO_LOG_LEVEL"] = "9"  # says with a number of the process that CUPTI has another client
import torch
from models import gpt

OWN = ("[memory]", "[OutOfMemory]")  # what the allocator tells the profiler


def used_by(stream, megabytes):
    """A block that is freed while another stream may still use it: PyTorch records an event."""
    block = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    block.record_stream(stream)


def streams(side):
    used_by(side, 1)
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # asks whether the event is over
    used_by(side, 3)
    torch.cuda.empty_cache()  # waits for it


def no_room():
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return True
    return False


def main():
    torch.manual_seed(7)
    model, loss = gpt(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    small = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    descent = torch.optim.SGD(small.parameters(), lr=0.1)
    rows = torch.randn(16, 8)
    side = torch.cuda.Stream()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for number in range(4):
            loss().backward()
            there = sum(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            value = small(rows).square().mean()
            value.backward()
            descent.step()
            descent.zero_grad()
            print("step", number, "gradients", there, "loss", value.item().hex(), flush=True)
            streams(side)
            print("no room", no_room(), flush=True)
    told = [event for event in profile.profiler.kineto_results.events() if event.name() in OWN]
    for name in OWN:
        print(name, sum(event.name() == name for event in told), "bytes", sum(event.nbytes() for event in told if event.name() == name))
    stats = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "allocated_bytes.all.peak", "active_bytes.all.current", "reserved_bytes.all.current", "num_ooms"):
        print(name, stats[name])
    torch.save(small.state_dict(), "model.pt")
    sys.exit(5)


main()
