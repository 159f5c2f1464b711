"""Programs that use more memory than they must, and the change that advice names for each.

    advised.py NAME [applied]   runs one of them, without or with the change, and prints its peaks as JSON
"""

import json
import sys
import time

import torch
from causes import MIB, PACE, WIDTH, Block, Net, batch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from waiting import wait_for_frames

APPLIED = "applied" in sys.argv[2:]


def step(model, optimizer, rows, width=1024):
    model(batch(rows, width)).float().pow(2).mean().backward()
    optimizer.step()


def kept_outputs():
    """Outputs are kept with their graphs."""
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    outputs = []
    for _ in range(80):
        output = model(batch(8192))
        output.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach().cpu() if APPLIED else output)


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def activations():
    """The activations of many blocks fill the device."""
    model = (Checkpointed if APPLIED else Net)(depth=16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(12):
        step(model, optimizer, 20_600)
        optimizer.zero_grad()


def kept_gradients():
    """Gradients are set to zero, and so live through the next forward pass."""
    with torch.device("cuda"):
        model = Net(width=4096, depth=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(12):
        step(model, optimizer, 2_700, 4096)
        optimizer.zero_grad(set_to_none=APPLIED)


def logits():
    """One output fills the device."""
    body, head = nn.Sequential(Block(1024), Block(1024)).cuda(), nn.Linear(1024, 128_000).cuda()
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for _ in range(12):
        hidden = body(batch(6_900))
        if APPLIED:
            # Each chunk has its own backward pass to the hidden states.
            leaf = hidden.detach().requires_grad_()
            for part in leaf.chunk(8):
                head(part).float().pow(2).mean().backward()
            hidden.backward(leaf.grad)
        else:
            head(hidden).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def streams():
    """Each request has a new stream, and what a stream cached serves no other."""
    model = Net(width=512, depth=2).cuda().eval()
    stream = torch.cuda.Stream()
    with torch.no_grad():
        for _ in range(24):
            stream = stream if APPLIED else torch.cuda.Stream()
            with torch.cuda.stream(stream):
                model(batch(8192, 512))


def growing_sizes():
    """Each request is larger than all before, so no cached segment serves it; the advised setting is in the environment."""
    with torch.no_grad():
        for size in range(200, 1200, 100):
            time.sleep(PACE)
            torch.empty(size * MIB, dtype=torch.uint8, device="cuda")


def evaluation():
    """Losses of an evaluation keep their graphs."""
    model = Net(depth=8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(10):
        step(model, optimizer, 512)
        optimizer.zero_grad()
    losses = []
    with torch.set_grad_enabled(not APPLIED):
        for _ in range(60):
            losses.append(model(batch(2048)).float().pow(2).mean())


def large_evaluation():
    """Batches of an evaluation are larger than those of training, and keep their graphs until their end."""
    model = Net(depth=16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        for _ in range(8):
            step(model, optimizer, 512)
            optimizer.zero_grad()
        with torch.set_grad_enabled(not APPLIED):
            for _ in range(3):
                model(batch(20_600)).float().pow(2).mean().item()


class Mish(nn.Module):
    def forward(self, x):
        return F.mish(x) if APPLIED else x * torch.tanh(torch.log(1 + torch.exp(x)))


def formula():
    """An activation is computed by its formula, each of whose operations keeps a result for the backward pass."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(WIDTH, 4 * WIDTH), Mish(), nn.Linear(4 * WIDTH, WIDTH))]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for rows in [2_000] * 6 + [15_000] * 6:
        step(model, optimizer, rows)
        optimizer.zero_grad()


class Recommender(nn.Module):
    def __init__(self, rows=12_000_000, width=64):
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=APPLIED)
        self.head = nn.Linear(width, 1)

    def forward(self, rows):
        return self.head(self.table(rows))


def tables():
    """Gradients of an embedding table have all of its rows, though a batch uses few."""
    with torch.device("cuda"):
        model = Recommender()
    optimizers = [torch.optim.Adam(model.parameters())]
    if APPLIED:
        table = torch.optim.SparseAdam(model.table.parameters())
        optimizers = [table, torch.optim.Adam(model.head.parameters())]
    for _ in range(12):
        model(torch.randint(0, 12_000_000, (4096,), device="cuda")).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(PACE)


def each_sample():
    """The gradients of all samples of a batch exist at once, so that each can be clipped."""
    model = Net(width=512, depth=4, classes=10).cuda()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    gradients = vmap(grad(lambda weights, x: functional_call(model, weights, (x,)).pow(2).mean()), in_dims=(None, 0))
    for rows in [32] * 8 + [512] * 4:
        size = 32 if APPLIED else rows
        for part in batch(rows, 512).split(size):
            found = gradients(weights, part)
            norms = sum(gradient.flatten(1).pow(2).sum(1) for gradient in found.values()).sqrt()
            for gradient in found.values():
                torch.einsum("b,b...->...", 1 / norms, gradient)
            del found, norms, gradient


def main():
    torch.empty(1, device="cuda")
    wait_for_frames()
    failure = None
    try:
        globals()[sys.argv[1]]()
    except torch.OutOfMemoryError as error:
        failure = error
    figures = {"done": True, "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps(figures), flush=True)
    if failure is not None:
        raise failure


if __name__ == "__main__":
    main()
