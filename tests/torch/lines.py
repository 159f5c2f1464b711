"""Holds tensors outside any module, and prints the source line and function that made each, by the marks in this file.
Then waits for a signal to end.

    lines: [address, bytes of its block, tag]
"""

import copy
import inspect
import io
import signal
import sys
import time

import torch
from models import gpt
from said import blocks, check, say, storage
from waiting import wait_for_frames

MIB = 1 << 20
held = []
SOURCE = inspect.getsource(sys.modules[__name__]).splitlines()


def keep(mark, function, *tensors):
    line = next(number for number, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}"))
    name = function if isinstance(function, str) else getattr(function, "__qualname__" if sys.version_info >= (3, 11) else "__name__")
    held.extend((tensor, f"lines.py:{line} {name}") for tensor in tensors)


def make_buffer(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")  # buffer


def größe(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")  # latin


def 缓冲区(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")  # wide


def 𠀀(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")  # letter


class Replay:
    def __init__(self, mib):
        self.states = torch.zeros(mib * MIB, dtype=torch.uint8, device="cuda")  # replay


def load(file):
    return torch.load(file, map_location="cuda")  # checkpoint


def deep_copy(tensors):
    return copy.deepcopy(tensors)  # copy


def average(model):
    averages = []
    for parameter in model.parameters():
        averages.append(parameter.detach().clone())  # average
    return averages


def batch():
    return torch.randn(2, MIB, device="cuda")  # input


@torch.no_grad()
def scores(weights):
    return weights @ weights.t()  # scores


def checkpoint():
    file = io.BytesIO()
    torch.save({"weights": torch.zeros(6 * MIB)}, file)
    file.seek(0)
    return file


torch.empty(1, device="cuda")
wait_for_frames()
keep("buffer", make_buffer, make_buffer(64))
keep("buffer", make_buffer, make_buffer(32))
keep("latin", größe, größe(8))
keep("wide", 缓冲区, 缓冲区(9))
keep("letter", 𠀀, 𠀀(10))
keep("replay", Replay.__init__, Replay(48).states)
loaded = load(checkpoint())["weights"]
keep("checkpoint", load, loaded)
keep("copy", deep_copy, deep_copy([loaded])[0])
model, loss = gpt(layers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
keep("average", average, *average(model))
keep("input", batch, batch())
keep("scores", scores, scores(torch.ones(1024, 64, device="cuda")))
outer = torch.zeros(MIB, device="cuda")  # outside
keep("outside", "<module>", outer)
activations = loss()
live = blocks()
lines = [[hex(storage(tensor)), live[storage(tensor)], tag] for tensor, tag in held]
check("held", lines=lines)
enough = []
signal.signal(signal.SIGTERM, lambda *_: enough.append(True))
say(holding=True)
while not enough:
    time.sleep(0.05)
say(done=True)
