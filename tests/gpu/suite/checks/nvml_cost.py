"""Cost of NVML's calls, which limits the daemon's sampling rate."""

import json
import subprocess
import time

from ..check import check
from ..stats import slope, summary


def measure(t, repetitions):
    command = [t.machine.built["nvml_cost"], "0", str(repetitions)]
    done = subprocess.run(command, env=t.environment(), capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"nvml_cost: {done.returncode} {done.stderr}")
    return json.loads(done.stdout)


def show(t, name, found):
    for call in ("memory_1", "memory_2", "list", "size_query", "graphics_list"):
        what = found[call]
        if what is None:
            t.measure(f"{name}: {call}", "absent")
        elif what["result"]:
            t.measure(f"{name}: {call}", f"result {what['result']}")
        else:
            t.measure(f"{name}: {call}", {k: v / 1000 if k != "n" else v for k, v in summary(what["ns"]).items()}, "us")


@check("nvml.cost", "each call, by the number of processes that use the GPU; is the size query as dear as the list",
       "nvml.md 1.6 and 5", needs=("nvml_cost", "driver"), seconds=180)
def cost(t):
    programs, medians, counts = [], [], []
    for clients in (0, 1, 4, 16):
        while len(programs) < clients:
            d = t.driver()
            d.begin()
            d.do("alloc", 4 << 20)
            programs.append(d)
        found = measure(t, t.times(300, 30))
        t.measure(f"{clients} clients: in the list", found["processes"])
        show(t, f"{clients} clients", found)
        if found["list"] and found["list"]["ns"]:
            medians.append(summary(found["list"]["ns"])["p50"] / 1000)
            counts.append(clients)
        if clients == 0:
            t.measure("nvmlInit", found["init_ns"] / 1e6, "ms")
    base, each = slope(counts, medians)
    t.measure("list: without clients, and for each", [base, each], "us")
    for d in programs:
        d.finish()


@check("nvml.load", "the same while a process allocates: does device memory stay cheap, and what do lists do to it",
       "nvml.md 0.1", needs=("nvml_cost", "driver"), seconds=120)
def load(t):
    d = t.driver()
    d.begin()
    d.do("start", 2 << 20, 0, 1)
    time.sleep(t.times(3, 0.5))
    alone = d.do("stop")
    d.do("start", 2 << 20, 0, 1)
    found = measure(t, t.times(1000, 50))
    beside = d.do("stop")
    show(t, "under load", found)
    for name, loop in (("alone", alone), ("beside constant NVML calls", beside)):
        t.measure(f"alloc and free of 2 MiB {name}", {k: loop[k] for k in ("steps", "p50_us", "p99_us", "worst_ns")})
    d.finish()
