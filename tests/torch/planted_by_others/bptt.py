# Perplexity of a stateful LSTM over a long text.
import math
import time
import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab=10000, dim=1024):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, num_layers=2, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids, state=None):
        y, state = self.rnn(self.embed(ids), state)
        return self.out(y), state


def perplexity(model, text, window=64):
    model.eval()
    state, total, count = None, 0.0, 0
    for start in range(0, text.shape[1] - 1, window):
        ids = text[:, start:start + window]
        logits, state = model(ids, state)
        total += nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).item()
        count += 1
        time.sleep(0.03)
    return math.exp(total / count)


model = LM().cuda()
text = torch.zeros(32, 64 * 150, dtype=torch.long, device="cuda")
print(perplexity(model, text))
