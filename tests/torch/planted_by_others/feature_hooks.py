# Look at intermediate features while the network trains.
import collections
import time
import torch
from torch import nn
from common_models import APPLIED, ConvNet

features = collections.defaultdict(list)


def save(name):
    def hook(module, inputs, output):
        features[name].append(output.detach().cpu() if APPLIED else output.detach())
    return hook


net = ConvNet().cuda()
net.stages[3].register_forward_hook(save("stage3"))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(150):
    x = torch.empty(64, 3, 128, 128, device="cuda")
    loss = nn.functional.cross_entropy(net(x), torch.zeros(64, dtype=torch.long, device="cuda"))
    opt.zero_grad()
    loss.backward()
    opt.step()
    time.sleep(0.02)
    if step % 50 == 0:
        print(step, {k: len(v) for k, v in features.items()})
