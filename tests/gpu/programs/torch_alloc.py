"""Allocates with PyTorch in stages, and prints torch's own figures after each."""

import sys

import torch
from torch_common import Agent, say, wait


def state(stage):
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    say(stage=stage, reserved=torch.cuda.memory_reserved(), allocated=torch.cuda.memory_allocated(), free=free,
        total=total, backend=torch.cuda.get_allocator_backend(), version=torch.__version__)
    wait()


torch.cuda.init()
torch.empty(1, device="cuda")
agent = Agent()
say(stage="start", agent=agent.library is not None,
    uuid=str(getattr(torch.cuda.get_device_properties(0), "uuid", "")))
wait()
first = torch.empty(1, device="cuda")
state("first tensor")
agent.push("weights")
kept = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (1, 3, 12, 50, 200)]
agent.pop()
state("tensors")
agent.push("work")
x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
loss = (x @ x).relu().sum()
loss.backward()
agent.pop()
state("matrix product and backward")
del kept, loss
torch.cuda.empty_cache()
state("given back")
sys.exit(0)
