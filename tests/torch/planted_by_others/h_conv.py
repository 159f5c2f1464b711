import time
import torch
from torch import nn
from common_models import ConvNet

torch.backends.cudnn.benchmark = True
net = ConvNet().cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler()
running = 0.0
for step in range(120):
    x, y = torch.empty(64, 3, 128, 128, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    running += loss.item()
    time.sleep(0.03)
print(running)
