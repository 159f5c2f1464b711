# Gradient accumulation: sum the losses of 16 micro-batches, then one backward.
import time
import torch
from torch import nn
from common_models import APPLIED, Encoder

with torch.device("cuda"):
    model = nn.Sequential(Encoder(32000, 1024, 16, 8, 512), nn.Linear(1024, 1000))
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
accumulate = 16
for step in range(25):
    total = 0
    if APPLIED:
        opt.zero_grad()
    for micro in range(accumulate):
        ids = torch.randint(0, 32000, (4, 512), device="cuda")
        loss = model(ids).square().mean() / accumulate
        if APPLIED:
            loss.backward()
        else:
            total = total + loss
        time.sleep(0.005)
    if not APPLIED:
        opt.zero_grad()
        total.backward()
    opt.step()
