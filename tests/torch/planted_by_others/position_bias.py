# Trains a tagger on sentences of many lengths; the first layer makes a bias of relative positions, and the others reuse it.
import random
import time
import torch
from torch import nn

WORDS, DIM, HEADS = 8000, 512, 8
biases = {}


def relative_bias(length):
    if length not in biases:
        place = torch.arange(length, device="cuda")
        distance = (place[None] - place[:, None]).abs().float()
        biases[length] = -distance[None] * torch.logspace(0, -8, HEADS, 2, device="cuda")[:, None, None]
    return biases[length]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.output, self.norm = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x):
        q, k, v = self.inputs(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + relative_bias(x.shape[1])
        return x + self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, DIM), nn.ModuleList(Attention() for _ in range(4))
        self.tags = nn.Linear(DIM, 17)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.tags(x)


random.seed(5)
tagger = Tagger().cuda()
optimizer = torch.optim.SGD(tagger.parameters(), 0.1)
for _ in range(120):
    ids = torch.zeros(1, random.randint(600, 2000), dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    nn.functional.cross_entropy(tagger(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    time.sleep(0.02)
