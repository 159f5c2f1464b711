"""Writes a memory snapshot (torch.cuda.memory._dump_snapshot) of a training with history to a file, the first argument.

Prints torch's own figures of that moment. Further arguments: `short` keeps a ring that is too short for the run, `mid`
starts the history in the middle, `none` records no history, `oom` runs out of memory and continues, `streams` leaves a
block that waits for a stream, `pinned` has page-locked memory, `devices` uses both devices, `python` omits C++ frames."""

import sys

import torch
from models import MODELS
from said import say

path, words = sys.argv[1], sys.argv[2:]


def record(entries):
    stacks = "python" if "python" in words else "all"
    torch.cuda.memory._record_memory_history(max_entries=entries, stacks=stacks)


def train(model, loss, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def give_up():
    try:
        torch.empty(64 << 30, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass


entries = 200 if "short" in words else 100_000
if "mid" not in words and "none" not in words:
    record(entries)
model, loss = MODELS["gpt"]()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train(model, loss, optimizer)
if "mid" in words:
    record(entries)
    train(model, loss, optimizer)
kept = []
if "devices" in words:
    kept.append(torch.ones(5_000_000, device="cuda:1"))
if "pinned" in words:
    kept.append(torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True))
if "oom" in words:
    give_up()
    kept.append(torch.ones(1000, device="cuda"))
if "streams" in words:
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(10_000_000_000)
        waits = torch.empty(7_000_000, dtype=torch.uint8, device="cuda")
    waits.record_stream(torch.cuda.current_stream())
    del waits
torch.cuda.empty_cache()
torch.cuda.memory._dump_snapshot(path)
stats = [torch.cuda.memory_stats(d) for d in range(torch.cuda.device_count())]
names = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "active": "active_bytes.all.current",
    "requested": "requested_bytes.all.current",
    "peak": "reserved_bytes.all.peak",
    "allocated_peak": "allocated_bytes.all.peak",
}
say(devices=[{name: of.get(key, 0) for name, key in names.items()} for of in stats])
say(done=True)
