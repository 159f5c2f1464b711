# A prefetcher that copies batches to the GPU ahead of time.
import collections
import time
import torch
from torch import nn
from common_models import ConvNet


def read_batches(n):
    for i in range(n):
        time.sleep(0.02)
        yield i


def prefetch(source, ahead=64):
    queue = collections.deque()
    for i in source:
        queue.append((torch.empty(128, 3, 224, 224, device="cuda"), torch.zeros(128, dtype=torch.long, device="cuda")))
        if len(queue) == ahead:
            yield queue.popleft()
    while queue:
        yield queue.popleft()


model = ConvNet(width=32).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for x, y in prefetch(read_batches(200)):
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
