# Same training that fitted yesterday.
import time
import torch
from torch import nn
from common_models import Encoder

with torch.device("cuda"):
    model = nn.Sequential(Encoder(50257, 1600, 25, 24, 1024), nn.Linear(1600, 50257))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(60):
    ids = torch.randint(0, 50257, (3, 1024), device="cuda")
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
print("finished")
