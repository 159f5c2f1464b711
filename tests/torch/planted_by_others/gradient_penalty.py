# Logs a penalty on the gradient of each step, for a plot at the end.
import torch
from torch import nn

net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.Tanh())), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.01)
penalties = []
for _ in range(60):
    loss = net(torch.zeros(1024, 2048, device="cuda")).square().mean()
    gradients = torch.autograd.grad(loss, net.parameters(), create_graph=True)
    penalties.append(sum(gradient.square().sum() for gradient in gradients))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.stack(penalties).max().item())
