"""Runs torch.profiler with the agent: counts the kernels it sees, and tests whether allocations are still recorded.
    torch_profile.py plain|pause"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile
from torch_common import Agent, say

torch.cuda.init()
x = torch.randn(1024, 1024, device="cuda")
agent = Agent()


def kernels():
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            y = (x @ x).relu()
        torch.cuda.synchronize()
    del y
    events = profiler.events()
    return sum(1 for e in events if "cuda" in str(e.device_type).lower())


paused = agent.pause() if sys.argv[1] == "pause" else False
first = kernels()
if paused:
    agent.resume()
kept = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
between = torch.cuda.memory_reserved()
paused = agent.pause() if sys.argv[1] == "pause" else False
second = kernels()
if paused:
    agent.resume()
more = torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
say(agent=agent.library is not None, kernels=[first, second], between=between, reserved=torch.cuda.memory_reserved(),
    version=torch.__version__)
