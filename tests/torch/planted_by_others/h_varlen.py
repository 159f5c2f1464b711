import os
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import random
import time
import torch
from common_models import Encoder

random.seed(7)
with torch.device("cuda"):
    model = Encoder(32000, 1024, 16, 8, 1024)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in range(120):
    n = random.randint(200, 1024)
    loss = model(torch.zeros(8192 // n, n, dtype=torch.long, device="cuda")).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.03)
