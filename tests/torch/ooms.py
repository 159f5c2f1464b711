"""Runs out of memory in three ways, and continues each time: the driver succeeds once the cache is flushed, the driver
fails again, and the pool has a limit."""

import torch
from said import check, say
from torch import nn
from waiting import wait_for_frames

GIB = 1 << 30


class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(1, 1)

    def forward(self, size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def ask(name, size):
    """Requests memory, and prints the result with torch's own figures of that moment."""
    before = torch.cuda.memory_stats()
    try:
        kept = greedy(size)
        said = len(kept) * 0 + 1
    except torch.cuda.OutOfMemoryError:
        kept, said = None, 0
    after = torch.cuda.memory_stats()
    counts = {key: after[key] - before[key] for key in ("num_alloc_retries", "num_ooms")}
    check(name, got=said, asked=size, **counts)
    return kept


greedy = Greedy()
torch.empty(1, device="cuda")
wait_for_frames()
cached = torch.empty(9 * GIB, dtype=torch.uint8, device="cuda")
del cached
kept = ask("survived", 10 * GIB)
ask("device", 8 * GIB)
del kept
torch.cuda.empty_cache()
# Any fraction, even 1, is a limit: from here on torch requests no memory beyond it from the driver.
torch.cuda.set_per_process_memory_fraction(0.25)
ask("pool", 6 * GIB)
say(done=True)
