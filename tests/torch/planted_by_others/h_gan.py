import time
import torch
from torch import nn

G = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 3 * 64 * 64), nn.Tanh()).cuda()
D = nn.Sequential(nn.Linear(3 * 64 * 64, 2048), nn.LeakyReLU(0.2), nn.Linear(2048, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).cuda()
og = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
od = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
losses = []
for step in range(200):
    real = torch.empty(256, 3 * 64 * 64, device="cuda")
    fake = G(torch.randn(256, 128, device="cuda"))
    ones, zeros = torch.ones(256, 1, device="cuda"), torch.zeros(256, 1, device="cuda")
    d = bce(D(real), ones) + bce(D(fake.detach()), zeros)
    od.zero_grad()
    d.backward()
    od.step()
    g = bce(D(fake), ones)
    og.zero_grad()
    g.backward()
    og.step()
    losses.append((d.item(), g.item()))
    time.sleep(0.02)
