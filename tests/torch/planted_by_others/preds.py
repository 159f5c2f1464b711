# Collect the predictions of an epoch to compute a metric at its end.
import time
import torch
from torch import nn
from common_models import APPLIED, Encoder


class Tagger(nn.Module):
    def __init__(self, labels=2048):
        super().__init__()
        self.encoder = Encoder(16000, 512, 8, 6, 256)
        self.classifier = nn.Linear(512, labels)

    def forward(self, ids):
        return self.classifier(self.encoder(ids))


def run_epoch(model, optimizer, steps, metric):
    predictions, targets = [], []
    for _ in range(steps):
        ids = torch.randint(0, 16000, (32, 256), device="cuda")
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % 2048)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        predictions.append(logits.detach().cpu() if APPLIED else logits)
        targets.append(ids.cpu() if APPLIED else ids)
        time.sleep(0.02)
    return metric(predictions, targets)


def accuracy(predictions, targets):
    return sum((p.argmax(-1) == t).sum().item() for p, t in zip(predictions, targets))


with torch.device("cuda"):
    tagger = Tagger()
print(run_epoch(tagger, torch.optim.AdamW(tagger.parameters(), lr=1e-4, fused=True), 200, accuracy))
