"""Loads the agent by `import gpumem` after some training. Prints torch's figures and tensor addresses at each check
afterwards.
"""

import os
import sys

import torch
from models import gpt
from said import addresses, numbers, say


def trained(model, loss, optimizer, steps):
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


model, loss = gpt(layers=4)
optimizer = torch.optim.AdamW(model.parameters())
trained(model, loss, optimizer, 2)
loss().backward()
other = torch.zeros(5 << 18, device="cuda:1")

sys.path.insert(0, os.environ["GPUMEM_PACKAGE"])
import gpumem  # noqa: E402


def check(name, *models):
    """Like the function in said.py, but calls the package."""
    gpumem.mark("check " + name)
    found = [row for pair in models for row in addresses(*pair)]
    status = gpumem.status()
    devices = [numbers(device) for device in range(torch.cuda.device_count())]
    say(check=name, devices=devices, addresses=found, state=status["state"])


check("attached", (model, None))
optimizer.step()
check("stepped", (model, optimizer))
optimizer.zero_grad()
trained(model, loss, optimizer, 3)
check("trained on", (model, optimizer))
more = torch.zeros(3 << 20, device="cuda")
check("more")
del model, loss, optimizer, more, other
torch.cuda.empty_cache()
check("emptied")
model, loss = gpt(layers=2)
optimizer = torch.optim.AdamW(model.parameters())
trained(model, loss, optimizer, 3)
check("anew", (model, optimizer))
say(done=True)
