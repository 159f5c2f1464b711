"""Runs out of memory at each place of a training step, and continues each time.

Prints the requested bytes, the place, and the bytes of gradients.

    check NAME: `asked` bytes, `phase` as the place is called, `gradients`: bytes of their blocks
"""

import torch
import torch.distributed as dist
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
#: Addresses of the buckets of DistributedDataParallel.
BUCKETS = set()


def gradient_bytes():
    live = blocks()
    found = {storage(p.grad) for p in model.parameters() if p.grad is not None}
    return sum(live[address] for address in found | BUCKETS)


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


class Within(TorchFunctionMode):
    """Is at the place with the first function of PyTorch that is called inside, or with each call of `wanted`."""

    def __init__(self, place, wanted=None):
        super().__init__()
        self.place, self.wanted = place, wanted

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if self.wanted in (None, getattr(function, "__name__", None)):
            demand.at(self.place)
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
    scaler.scale(loss).backward()
    with Within("between/unscale", "_amp_foreach_non_finite_check_and_unscale_"):
        scaler.unscale_(optimizer)
    demand.at("between/clipping")
    optimizer.step()  # not the scaler's step, which reads numbers from the device
    scaler.update()
    demand.at("between/optimizer")
    with Within("optimizer/zero_grad"):
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


def reduce_gradients():
    """Runs out of memory in the hook that DistributedDataParallel calls in place of an all-reduce."""
    global model
    # Copies to the simulated device cannot be read back, so shapes and bucket order cannot be exchanged.
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_: None
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).cuda()
    before = blocks()
    # Without this the buckets would be rebuilt in the second pass.
    how = {"bucket_cap_mb": 1, "find_unused_parameters": True}
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0], **how)
    BUCKETS.update(blocks().keys() - before.keys())

    def reduced(_, bucket):
        assert storage(bucket.buffer()) in BUCKETS
        if bucket.is_last():
            demand.at("backward/all-reduce")
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, reduced)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        if number == 3:
            demand.wanted = "backward/all-reduce"
        parallel(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert demand.wanted is None
    dist.destroy_process_group()


torch.empty(1, device="cuda")
wait_for_frames()
model = Net().cuda()
model.first.linear.weight.register_post_accumulate_grad_hook(accumulated)
optimizer = Greedy(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for _ in range(4):
    step()
PLACES = ["forward/module", "forward/custom function", "forward/loss"]
PLACES += ["backward/recomputed forward/reentrant", "backward/recomputed forward/non-reentrant", "backward/eager"]
PLACES += ["backward/hook", "backward/accumulated", "between/unscale", "between/clipping", "optimizer/step"]
PLACES += ["between/optimizer"]
PLACES += ["optimizer/zero_grad", "between/batch"]
for place in PLACES:
    demand.wanted = place
    step()
    assert demand.wanted is None, place
    settle()
evaluate()
model = optimizer = scaler = None
reduce_gradients()
say(done=True)
