"""Programs that use more memory than they must, and the change that advice names for each.

    advised.py NAME [applied]   runs one of them, without or with the change, and prints its peaks as JSON
"""

import json
import sys
import time

import torch
from causes import MIB, PACE, Block, Net, batch
from torch import nn
from torch.utils.checkpoint import checkpoint
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
