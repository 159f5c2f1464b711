"""A CPU-bound training step, timed: what `bench torch` conducts. Each line on standard input is one thing to do, each answer a
line of JSON: nanoseconds, of a step its time and its CPU time (all threads of the process, ours too), or null.

  step N        the median of N steps             pair N     a torch.empty and its end, in ns, the least of N chunks
  none N        with torch's memory history, without contexts        python N    with Python stacks
  profile N     under torch.profiler with profile_memory             scope N     gpumem.scope around nothing
"""

import contextlib
import json
import statistics
import sys
import time

import torch
from models import gpt

now = time.perf_counter_ns
model, loss = gpt(layers=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step():
    began, cpu = now(), time.process_time_ns()
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return now() - began, time.process_time_ns() - cpu


def steps(count):
    return [statistics.median(times) for times in zip(*(step() for _ in range(count)))]


def history(count, context):
    keep = {"max_entries": 100_000}
    torch.cuda.memory._record_memory_history("all", context=context, stacks="python", **keep)
    try:
        return steps(count)
    finally:
        torch.cuda.memory._record_memory_history(None)


def profiled(count):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True):
        return steps(count)


def pair(chunks):
    least = None
    for _ in range(chunks):
        began = now()
        for _ in range(500):
            torch.empty(1024, device="cuda")
        took = (now() - began) / 500
        least = took if least is None else min(least, took)
    return least


def scope(chunks):
    try:
        import gpumem
    except ImportError:
        return None

    def least_of(make):
        least = None
        for _ in range(chunks):
            began = now()
            for _ in range(2000):
                with make("bench"):
                    pass
            took = (now() - began) / 2000
            least = took if least is None else min(least, took)
        return least

    return least_of(gpumem.scope) - least_of(contextlib.nullcontext)


WHAT = {
    "step": steps,
    "none": lambda count: history(count, None),
    "python": lambda count: history(count, "all"),
    "profile": profiled,
    "pair": pair,
    "scope": scope,
}
steps(5)
before = torch.cuda.memory_stats()["allocation.all.allocated"]
step()
events = 2 * (torch.cuda.memory_stats()["allocation.all.allocated"] - before)
print(json.dumps({"ready": torch.__version__, "events": events, "parameters": sum(1 for _ in model.parameters())}), flush=True)
for line in sys.stdin:
    word, _, count = line.partition(" ")
    print(json.dumps(WHAT[word](int(count or 1))), flush=True)
