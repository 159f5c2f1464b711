"""Runs out of memory at each place of a training step, and continues each time.

Prints the requested bytes, the place, and the bytes of gradients.

    check NAME: `asked` bytes, `phase` as the place is called, `gradients`: bytes of their blocks
"""

import torch
from said import blocks, check, say, storage
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from waiting import wait_for_frames

GIB = 1 << 30
WIDTH = 512


class Demand:
    """Allocates at the next place that is reached, if that is the selected one."""

    def __init__(self):
        self.count, self.wanted = 0, None

    def at(self, place):
        if place != self.wanted:
            return
        self.wanted = None
        self.count += 1
        asked = (1000 + self.count) * GIB
        gradients = gradient_bytes()
        try:
            torch.empty(asked, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            check(place, asked=asked, phase=place.split("/")[0], gradients=gradients)
        else:
            raise AssertionError("the device is larger than any")


demand = Demand()


def gradient_bytes():
    live = blocks()
    found = {storage(p.grad) for p in model.parameters() if p.grad is not None}
    return sum(live[address] for address in found)


class Layer(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place, self.calls = place, 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if torch.is_grad_enabled() or not self.training:
            demand.at(self.place)
        self.calls += 1
        if self.calls == 2:
            demand.at(f"backward/recomputed {self.place}")
        return self.linear(x)


class Square(torch.autograd.Function):
    """Its forward pass runs without gradients, its backward pass needs memory."""

    @staticmethod
    def forward(context, x):
        demand.at("forward/custom function")
        return x * 2

    @staticmethod
    def backward(context, gradient):
        demand.at("backward/eager")
        return gradient * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer("forward/module"), Layer("forward/reentrant")
        self.third = Layer("forward/non-reentrant")

    def forward(self, x):
        for layer in self.children():
            layer.calls = 0
        x = Square.apply(self.first(x))
        if not self.training:
            demand.at("evaluation/module")
            return x
        x = checkpoint(self.second, x, use_reentrant=True)
        return checkpoint(self.third, x, use_reentrant=False)


class Greedy(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        demand.at("optimizer/step")
        return super().step()


class Clearing(TorchFunctionMode):
    """While gradients are cleared."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        demand.at("optimizer/zero_grad")
        return function(*arguments, **(keywords or {}))


def accumulated(_):
    demand.at("backward/accumulated")


def step():
    data = torch.randn(64, WIDTH, device="cuda")
    demand.at("between/batch")
    result = model(data)
    loss = result.square().mean()
    demand.at("forward/loss")
    result.register_hook(lambda _: demand.at("backward/hook"))
    loss.backward()
    demand.at("between/clipping")
    optimizer.step()
    demand.at("between/optimizer")
    with Clearing():
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()


def settle():
    """Separates two records: the ledger checks again after enough events."""
    for _ in range(100):
        torch.empty(1, device="cuda")


def evaluate():
    model.eval()
    for no_gradients in (torch.no_grad, torch.inference_mode):
        settle()
        demand.wanted = "evaluation/module"
        with no_gradients():
            model(torch.randn(64, WIDTH, device="cuda"))
        assert demand.wanted is None
    model.train()


torch.empty(1, device="cuda")
wait_for_frames()
model = Net().cuda()
model.first.linear.weight.register_post_accumulate_grad_hook(accumulated)
optimizer = Greedy(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    step()
PLACES = ["forward/module", "forward/custom function", "forward/loss"]
PLACES += ["backward/recomputed forward/reentrant", "backward/recomputed forward/non-reentrant", "backward/eager"]
PLACES += ["backward/hook", "backward/accumulated", "between/clipping", "optimizer/step", "between/optimizer"]
PLACES += ["optimizer/zero_grad", "between/batch"]
for place in PLACES:
    demand.wanted = place
    step()
    assert demand.wanted is None, place
    settle()
evaluate()
say(done=True)
