"""Looks for its batch size as some trainers do: asks for too much, catches the error, asks for less. Five hundred times."""

import torch
from said import say
from torch import nn

MIB = 1 << 20
TIMES = 500


class Model(nn.Module):
    def forward(self, size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")


torch.empty(1, device="cuda")
model, caught = Model(), 0
for at in range(TIMES):
    try:
        model((40_000 - at) * MIB)
    except torch.cuda.OutOfMemoryError:
        caught += 1
kept = model(64 * MIB)
say(caught=caught, done=True)
