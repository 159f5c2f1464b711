import time
import torch
from torch import nn
from common_models import APPLIED, Encoder

torch.manual_seed(0)
with torch.device("cuda"):
    net = Encoder(50000, 2048, 16, 24, 512)
    out = nn.Linear(2048, 128)
params = list(net.parameters()) + list(out.parameters())
opt = torch.optim.AdamW(params, lr=2e-4, weight_decay=0.05, eps=1e-6, fused=APPLIED or None)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
for it in range(40):
    x = torch.randint(0, 50000, (1, 128), device="cuda")
    loss = out(net(x)).float().pow(2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
    sched.step()
    opt.zero_grad()
    time.sleep(0.1)
print("done")
