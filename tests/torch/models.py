"""Models that train in a second on the simulated machine, as people write them: nothing of gpumem in here."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        split = lambda t: t.view(batch, length, self.heads, -1).transpose(1, 2)
        q, k, v = (split(t) for t in self.c_attn(x).split(width, dim=2))
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1))
        return self.c_proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """`checkpointing`: None, "reentrant" or "non_reentrant"."""

    def __init__(self, words=512, width=64, heads=4, layers=6, length=32, checkpointing=None):
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words)
        self.checkpointing = checkpointing

    def forward(self, words):
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        for block in self.h:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.lm_head(self.ln_f(x))


class Reentrant(GPT):
    """Has a separate class name: a compiler's cached parts of one model may outlive it."""

    def __init__(self):
        super().__init__(layers=3, checkpointing="reentrant")


class NonReentrant(GPT):
    def __init__(self):
        super().__init__(layers=3, checkpointing="non_reentrant")


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """As torchvision's ResNet-18, narrower."""

    def __init__(self, classes=100, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
        for number, (inside, outside, stride) in enumerate(sizes, 1):
            layer = nn.Sequential(Residual(inside, outside, stride), Residual(outside, outside, 1))
            setattr(self, f"layer{number}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Tagger(nn.Module):
    """Two layers of LSTM."""

    def __init__(self, words=512, width=64, tags=32):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.out = nn.Linear(width, tags)

    def forward(self, words):
        return self.out(self.lstm(self.embedding(words))[0])


def gpt(device="cuda", kind=GPT, **how):
    words = torch.randint(0, 512, (4, 32), device=device)
    model = kind(**how).to(device)
    return model, lambda: F.cross_entropy(model(words).view(-1, 512), words.view(-1))


def resnet(device="cuda"):
    model, images = ResNet().to(device), torch.randn(8, 3, 64, 64, device=device)
    kinds = torch.zeros(8, dtype=torch.long, device=device)
    return model, lambda: F.cross_entropy(model(images), kinds)


def lstm(device="cuda"):
    model, words = Tagger().to(device), torch.randint(0, 512, (8, 16), device=device)
    return model, lambda: model(words).square().mean()


MODELS = {
    "gpt": gpt,
    "resnet": resnet,
    "lstm": lstm,
    "reentrant": lambda device="cuda": gpt(device, Reentrant),
    "non_reentrant": lambda device="cuda": gpt(device, NonReentrant),
}
