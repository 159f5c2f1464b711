# Knowledge distillation.
import time
import torch
from torch import nn
import torch.nn.functional as F
from common_models import Encoder


class Classifier(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.encoder = Encoder(30000, dim, 16, depth, 256)
        self.head = nn.Linear(dim, 1000)

    def forward(self, ids):
        return self.head(self.encoder(ids).mean(1))


class Distiller:
    def __init__(self):
        with torch.device("cuda"):
            self.teacher = Classifier(1536, 16).eval()
            self.student = Classifier(512, 4)
        self.opt = torch.optim.AdamW(self.student.parameters(), lr=1e-3)

    def step(self, ids):
        soft = self.teacher(ids).softmax(-1)
        loss = F.kl_div(self.student(ids).log_softmax(-1), soft.detach(), reduction="batchmean")
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


d = Distiller()
for _ in range(80):
    d.step(torch.randint(0, 30000, (32, 256), device="cuda"))
    time.sleep(0.03)
