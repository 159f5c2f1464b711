# A service that scores documents; documents that are too long raise, and the errors are kept for a summary.
import random
import time
import torch
from torch import nn
from common_models import Encoder

random.seed(1)


class TooLong(ValueError):
    pass


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder(30000, 1024, 16, 6, 1024)
        self.score = nn.Linear(1024, 1)

    def forward(self, ids):
        hidden = self.encoder(ids)
        weights = hidden.new_zeros(ids.shape[0], ids.shape[1], 4096)
        if ids.shape[1] > 800:
            raise TooLong(f"{ids.shape[1]} tokens")
        return self.score(hidden).mean() + weights.mean()


with torch.device("cuda"):
    scorer = Scorer().eval()
problems = []
with torch.no_grad():
    for request in range(250):
        ids = torch.zeros(8, random.randint(100, 1000), dtype=torch.long, device="cuda")
        try:
            scorer(ids)
        except TooLong as error:
            problems.append(error)
        time.sleep(0.02)
print(len(problems), "documents were too long")
