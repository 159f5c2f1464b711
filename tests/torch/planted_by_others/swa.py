import time
import torch
from torch import nn
from common_models import APPLIED, ConvNet

model = ConvNet(width=128).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
history = []


def snapshot():
    """Weights of every epoch, to average the last ones at the end."""
    return {name: tensor.detach().cpu() if APPLIED else tensor.detach().clone() for name, tensor in model.state_dict().items()}


for epoch in range(25):
    for _ in range(8):
        images = torch.empty(16, 3, 96, 96, device="cuda")
        loss = nn.functional.cross_entropy(model(images), torch.zeros(16, dtype=torch.long, device="cuda"))
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
    history.append(snapshot())

averaged = {name: sum(h[name] for h in history[-5:]) / 5 for name in history[0]}
model.load_state_dict(averaged)
