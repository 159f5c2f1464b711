# Warm restarts: a fresh optimizer for each cycle, the schedulers are kept for a plot of the learning rates.
import time
import torch
from torch import nn
from common_models import APPLIED, Encoder

with torch.device("cuda"):
    model = Encoder(20000, 1024, 16, 8, 128)
schedulers = []


def cycle(steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    schedulers[:] = [*([] if APPLIED else schedulers), scheduler]
    for _ in range(steps):
        out = model(torch.randint(0, 20000, (8, 128), device="cuda"))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        scheduler.step()
        time.sleep(0.02)


for _ in range(12):
    cycle(15)
print([s.get_last_lr() for s in schedulers][-1])
