# Gradient accumulation: sum the losses of 16 micro-batches, then one backward.
import time
import torch
from torch import nn
from common_models import Encoder

with torch.device("cuda"):
    model = nn.Sequential(Encoder(32000, 1024, 16, 8, 512), nn.Linear(1024, 1000))
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
accumulate = 16
for step in range(25):
    total = 0
    for micro in range(accumulate):
        ids = torch.randint(0, 32000, (4, 512), device="cuda")
        total = total + model(ids).square().mean() / accumulate
        time.sleep(0.005)
    opt.zero_grad()
    total.backward()
    opt.step()
