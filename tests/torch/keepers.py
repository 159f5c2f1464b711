"""Programs that run out of memory because a variable keeps tensors, or because one step needs too much: `keepers.py NAME`.

Each prints what the program itself can see of a scan: the error, calls of its own observer, reference counts, settings of the
garbage collector, and whether an object that it drops is freed at once.
"""

import collections
import gc
import sys
import time
import weakref

import torch
from said import say
from torch import nn
from waiting import wait_for_frames

MIB = 1 << 20


def block(size=64):
    return torch.empty(size * MIB, dtype=torch.uint8, device="cuda")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, inputs):
        outputs = [inputs]
        for _ in range(6):
            outputs.append(self.linear(outputs[-1]).relu())
        return outputs[-1]


class ReplayBuffer:
    def __init__(self):
        self.items = collections.deque()


class Sample:
    def __init__(self, image):
        self.image = image


class Cycle:
    def __init__(self):
        self.own = self
        self.image = block()


class Request:
    """Refers to itself by a method."""

    def __init__(self, image):
        self.image = image
        self.on_done = self.close

    def close(self):
        self.image = None


HISTORY = []


def local_list():
    losses = []
    net = Net().cuda()
    while True:
        losses.append(net(torch.empty(4096, 1024, device="cuda")).square().mean())


def attribute():
    buffer = ReplayBuffer()
    while True:
        buffer.items.append((block(), len(buffer.items)))


def global_list():
    while True:
        HISTORY.append({"image": block()})


def objects():
    samples = []
    while True:
        samples.append(Sample(block()))


def exceptions():
    def fail():
        image = block()
        raise ValueError(image.shape)

    errors = []
    while True:
        try:
            fail()
        except ValueError as error:
            errors.append(error)


def exceptions_of_passes():
    """Most tensors are kept by graphs alone."""
    layers = (layer for _ in range(48) for layer in (nn.Linear(1024, 1024), nn.GELU()))
    net, errors = nn.Sequential(*layers).cuda(), []

    def fail():
        outputs = net(torch.empty(256, 1024, device="cuda"))
        raise ValueError(outputs.shape)

    while True:
        try:
            fail()
        except ValueError as error:
            errors.append(error)


def closure():
    def make():
        seen = []
        return lambda: seen.append(block())

    hook = make()
    while True:
        hook()


def cycles():
    gc.disable()
    while True:
        Request(block())


def running_sum():
    net, total = Net().cuda(), 0
    while True:
        total = total + net(torch.empty(4096, 1024, device="cuda")).square().mean()


def large_batch():
    """Healthy but for its size: nothing is kept from step to step."""
    net = Net().cuda()
    for rows in (1024, 4096, 4_000_000):
        batch = {"image": torch.empty(rows, 1024, device="cuda"), "mask": torch.empty(rows, device="cuda")}
        net(batch["image"]).square().mean().backward()


def large_model():
    """The list of layers holds most of the memory, as it should."""
    layers = nn.ModuleList(nn.Linear(8192, 8192) for _ in range(8)).cuda()
    while True:
        layers.append(nn.Linear(8192, 8192).cuda())


def seen_by_the_program(program):
    calls = []
    torch.cuda.init()
    torch._C._cuda_attach_out_of_memory_observer(lambda *arguments: calls.append(arguments))
    held = [block(1), {"image": block(1)}]
    counts = list(map(sys.getrefcount, [*held, held, HISTORY, ReplayBuffer]))
    collector = gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()
    gc.collect()
    gc.disable()
    cycle = Cycle()
    gone = weakref.ref(cycle)
    del cycle
    error = None
    try:
        program()
    except torch.cuda.OutOfMemoryError as raised:
        error = str(raised).partition(" Tried")[0]
    dropped = weakref.ref(held[0])
    is_uncollected = gone() is not None
    gc.enable()
    say(
        error=error,
        observed=len(calls),
        same_counts=counts == list(map(sys.getrefcount, [*held, held, HISTORY, ReplayBuffer])),
        same_collector=collector == (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()),
        is_uncollected=is_uncollected,
    )
    held[0] = None
    say(is_freed=dropped() is None)


torch.empty(1, device="cuda")
wait_for_frames()
chosen = globals()[sys.argv[1]]
if len(sys.argv) > 2:
    seen_by_the_program(chosen)
    say(done=True)
else:
    chosen()
