# Vision transformer on high-resolution tiles.
import time
import torch
from torch import nn
from common_models import Layer


class ViT(nn.Module):
    def __init__(self, dim=768, depth=24, patch=16, size=512, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.pos = nn.Parameter(torch.zeros(1, (size // patch) ** 2, dim))
        self.blocks = nn.Sequential(*[Layer(dim, 12) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.norm(self.blocks(x)).mean(1))


def main():
    with torch.device("cuda"):
        model = ViT()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(40):
        images = torch.empty(32, 3, 512, 512, device="cuda")
        labels = torch.zeros(32, dtype=torch.long, device="cuda")
        loss = nn.functional.cross_entropy(model(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.06)


if __name__ == "__main__":
    main()
