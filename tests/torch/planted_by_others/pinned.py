# Offload the activations of each request to pinned host memory "for later analysis".
import time
import torch
from torch import nn


class Recorder:
    def __init__(self):
        self.rows = []

    def keep(self, t):
        buffer = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        buffer.copy_(t, non_blocking=True)
        self.rows.append(buffer)


net = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda().eval()
rec = Recorder()
with torch.no_grad():
    for i in range(100):
        y = net(torch.empty(4096, 4096, device="cuda"))
        rec.keep(y)
        time.sleep(0.05)
