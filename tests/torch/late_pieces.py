"""Loads the agent while tensors lie in an expandable segment mapped in pieces (the argument: MiB of a piece); then
frees some.
"""

import os
import sys

import torch
from said import numbers, say

PIECE = int(sys.argv[1]) << 20
tensors = [torch.zeros(PIECE, dtype=torch.uint8, device="cuda") for _ in range(10)]

sys.path.insert(0, os.environ["GPUMEM_PACKAGE"])
import gpumem  # noqa: E402


def check(name):
    """As in late.py."""
    gpumem.mark("check " + name)
    devices = [numbers(device) for device in range(torch.cuda.device_count())]
    say(check=name, devices=devices, addresses=[], state=gpumem.status()["state"])


check("attached")
for at in (8, 1):
    del tensors[at]
    torch.cuda.empty_cache()
    check("without %d" % at)
tensors.append(torch.zeros(PIECE, dtype=torch.uint8, device="cuda"))
check("one more")
del tensors
torch.cuda.empty_cache()
check("emptied")
say(done=True)
