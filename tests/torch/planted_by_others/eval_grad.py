import argparse
import time
import torch
from torch import nn, optim
from common_models import APPLIED, ConvNet

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--eval-batch", type=int, default=512)
args = p.parse_args()
dev = "cuda"


def loader(n, batch):
    for _ in range(n):
        time.sleep(0.03)
        yield torch.empty(batch, 3, 160, 160, device=dev), torch.zeros(batch, dtype=torch.long, device=dev)


def train(model, criterion, optimizer):
    model.train()
    for x, y in loader(25, 64):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()


def evaluate(model, criterion):
    model.eval()
    total, correct = 0.0, 0
    for x, y in loader(6, args.eval_batch):
        out = model(x)
        total += criterion(out, y).item()
        correct += (out.argmax(1) == y).sum().item()
    return total, correct


model = ConvNet().to(dev)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for epoch in range(args.epochs):
    train(model, criterion, optimizer)
    with torch.set_grad_enabled(not APPLIED):
        total, correct = evaluate(model, criterion)
    print(f"epoch {epoch}: val loss {total:.3f}, correct {correct}")
