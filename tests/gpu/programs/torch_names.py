"""Trains a typical model and prints torch's own memory figures after each step. Does not use gpumem.
    torch_names.py gpt|resnet [--compiled] [--profiled]"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch_common import say, wait

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=("gpt", "resnet"))
parser.add_argument("--compiled", action="store_true", help="each block of the model by torch.compile")
parser.add_argument("--backend", default="inductor", help="of torch.compile")
parser.add_argument("--profiled", action="store_true", help="torch.profiler around one step")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--small", action="store_true")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words, width, heads, layers):
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.lm_head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        outside = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.blocks = nn.ModuleList()
        inside = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                self.blocks.append(Bottleneck(inside, width, stride if number == 0 else 1))
                inside = 4 * width
        self.fc = nn.Linear(inside, 1000)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))


torch.manual_seed(1)
if options.model == "gpt":
    words, width, heads, layers, batch, length = (512, 128, 4, 3, 2, 64) if options.small else (50257, 768, 12, 12, 8, 512)
    model = GPT(words, width, heads, layers).cuda()
    blocks = model.h
    data = torch.randint(words, (batch, length), device="cuda")
    target = data.flatten()
    loss_of = lambda: F.cross_entropy(model(data).flatten(0, 1), target)
else:
    batch, side = (2, 64) if options.small else (64, 224)
    model = ResNet50().cuda()
    blocks = model.blocks
    data = torch.randn(batch, 3, side, side, device="cuda")
    target = torch.zeros(batch, dtype=torch.long, device="cuda")
    loss_of = lambda: F.cross_entropy(model(data), target)
if options.compiled:
    for block in blocks:
        block.compile(backend=options.backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = loss_of()
    loss.backward()
    optimizer.step()


def rounded(tensors):
    """Returns the minimum that torch's allocator reserves for the storages of `tensors`, in bytes."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-n // 512) * 512 for n in storages.values()), len(storages)


for number in range(options.steps):
    if options.profiled and number == 1:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            step()
    else:
        step()
    torch.cuda.synchronize()
    parameters = list(model.parameters())
    state = [s for p in parameters for s in optimizer.state[p].values() if torch.is_tensor(s) and s.is_cuda]
    say(step=number, allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved(),
        parameters=rounded(parameters), gradients=rounded([p.grad for p in parameters]), state=rounded(state),
        version=torch.__version__, model=type(model).__name__)
    wait()
