# Trains a stateful GRU: one optimizer step for each book, one backward pass for each page.
import torch
from torch import nn
from common_models import APPLIED


class Reader(nn.Module):
    def __init__(self, letters=200, dim=768):
        super().__init__()
        self.letters, self.memory = nn.Embedding(letters, dim), nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.next = nn.Linear(dim, letters)

    def forward(self, page, state):
        hidden, state = self.memory(self.letters(page), state)
        return self.next(hidden), state


reader = Reader().cuda()
optimizer = torch.optim.Adam(reader.parameters())
for book in range(2):
    state = None
    for page in range(60):
        page = torch.zeros(48, 128, dtype=torch.long, device="cuda")
        logits, state = reader(page, state)
        nn.functional.cross_entropy(logits.flatten(0, 1), page.flatten()).backward(retain_graph=not APPLIED)
        if APPLIED:
            state = state.detach()
    optimizer.step()
    optimizer.zero_grad()
