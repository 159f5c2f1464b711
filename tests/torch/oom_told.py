"""Checks gpumem's report of an out-of-memory error that the program catches. Prints `ok`."""

import os
import sys
import time

sys.path.insert(0, os.environ["GPUMEM_PACKAGE"])

import torch

import gpumem

held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
assert gpumem.last_oom() is None
torch.cuda.set_per_process_memory_fraction(0.01)
try:
    with gpumem.scope("greedy"):
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    pass
else:
    raise AssertionError("it was to fail")
deadline = time.monotonic() + 60
while gpumem.last_oom() is None:
    assert time.monotonic() < deadline, gpumem.report()
    time.sleep(0.1)
oom = gpumem.last_oom()
assert oom["asked_bytes"] == 1 << 30, oom
assert "greedy" in str(oom["tag"]), oom
assert oom["device_name"].startswith("GPU-"), oom
assert "greedy" in gpumem.report() or "oom" in gpumem.report().lower()
print("ok")
