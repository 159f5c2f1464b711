"""Compares gpumem's in-process figures with torch's: live blocks, peaks of ranges, names, retags. Prints `ok`."""

import os
import sys
import time

sys.path.insert(0, os.environ["GPUMEM_PACKAGE"])

import torch

import gpumem

MIB = 1 << 20


def device():
    return next(device for device in gpumem.snapshot()["devices"] if device["ordinal"] == 0)


def compare(where):
    found = device()
    pool = next(pool for pool in found["pools"] if pool["name"] == "torch")
    assert pool["block_bytes"] - pool["pending_bytes"] == torch.cuda.memory_allocated(), (where, pool)
    assert pool["segment_bytes"] == torch.cuda.memory_reserved(), (where, pool)
    parts = ["direct_bytes", "block_bytes", "pool_idle_bytes", "opaque_bytes"]
    assert sum(found[part] for part in parts) == found["tracked_bytes"] + found["unseen_bytes"], (where, found)
    assert found["unseen_bytes"] == 0, (where, found)
    return found


with gpumem.scope("first"):
    first = torch.empty(MIB, dtype=torch.uint8, device="cuda")
found = compare("first")
assert {tag["path"]: tag["bytes"] for tag in found["tags"] if tag["of"] == "blocks"} == {"first": MIB}, found

torch.cuda.reset_peak_memory_stats()
with gpumem.peak() as whole:
    with gpumem.scope("high"):
        many = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    compare("many")
    del many
    with gpumem.peak() as part:
        with gpumem.scope("low"):
            kept = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
assert whole.block_bytes == torch.cuda.max_memory_allocated() == 9 * MIB, whole.devices
assert whole.composition == {"high": 8 * MIB, "first": MIB}, whole.composition
assert (part.block_bytes, part.composition) == (4 * MIB, {"low": 3 * MIB, "first": MIB}), part.devices
compare("after")

assert gpumem.retag([kept, {"again": kept}, first[100:]], "cache", role="kv_cache") == 2
roles = compare("retag")["roles"]
assert roles["kv_cache"] == 4 * MIB, roles
assert gpumem.retag(kept, role="parameter_copy") == 1
assert compare("copy")["roles"]["parameter_copy"] == 3 * MIB
assert gpumem.retag(torch.empty(8), "host") == 0
model = torch.nn.Linear(256, 256).to("cuda")
gpumem.watch(model, name="student")
found = compare("watch")
parameters = {tag["path"]: tag["bytes"] for tag in found["tags"] if tag["role"] == "parameter"}
assert sum(parameters.values()) == 256 * 256 * 4 + 256 * 4, found["tags"]
assert all("student" in path for path in parameters), parameters
del first, kept, model
# On a busy machine the agent's own thread may be reading the modules now. They then end a moment later.
end = time.monotonic() + 30
while torch.cuda.memory_allocated() and time.monotonic() < end:
    time.sleep(0.01)
torch.cuda.empty_cache()
compare("empty")
print("ok")
