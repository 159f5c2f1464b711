# k-nearest neighbours of all embeddings.
import time
import torch
from torch import nn

with torch.device("cuda"):
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128))


def embeddings(n, batch=4096):
    with torch.no_grad():
        parts = []
        for i in range(0, n, batch):
            parts.append(net(torch.empty(batch, 256, device="cuda")))
            time.sleep(0.02)
        return torch.cat(parts)


def nearest(points, k=10):
    distances = torch.cdist(points, points)
    return distances.topk(k, largest=False).indices


points = embeddings(50 * 4096)
print(nearest(points).shape)
