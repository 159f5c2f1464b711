"""What a program says of itself, for a test to hold against what was recorded of it.

`check(name)` puts a mark into the stream of events and prints torch's own numbers of that moment. `GroundTruth` puts a
mark at each begin and end of a module's call, by a wrapper around `nn.Module.__call__`: slow and simple, and right by
construction.
"""

import ctypes
import json
import os
import threading

import torch
from torch import nn

_path = os.environ.get("CUDA_INJECTION64_PATH")
_mark = ctypes.CDLL(_path).gpumem_mark if _path else lambda name: None


def mark(name):
    _mark(name.encode())


def say(**what):
    print(json.dumps(what), flush=True)


def numbers(device):
    stats = torch.cuda.memory_stats(device)
    names = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "active": "active_bytes"}
    return {name: stats.get(f"{key}.all.current", 0) for name, key in names.items()}


def check(name, **more):
    """Call it where no other thread allocates."""
    mark(f"check {name}")
    say(check=name, devices=[numbers(d) for d in range(torch.cuda.device_count())], **more)


class GroundTruth:
    """While it is entered: `enter PATH` and `leave` around every call of one of the model's modules, on the calling
    thread; `rest` around backward and optimizer."""

    def __init__(self, model):
        root = type(model).__name__
        self.paths = {id(m): f"{root}/{name}" if name else root for name, m in model.named_modules()}

    def __enter__(self):
        self.original = original = nn.Module.__call__
        paths = self.paths

        def call(module, *args, **kwargs):
            path = paths.get(id(module))
            if path is None or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            mark(f"enter {path}")
            try:
                return original(module, *args, **kwargs)
            finally:
                mark("leave")

        nn.Module.__call__ = call
        return self

    def __exit__(self, *_):
        nn.Module.__call__ = self.original


def addresses(model, optimizer=None):
    """Storages by address: `what`, and the module that owns it."""
    root, found = type(model).__name__, []
    for name, p in model.named_parameters():
        owner, _, _ = name.rpartition(".")
        path = f"{root}/{owner}" if owner else root
        found.append(("parameter", p, path))
        if p.grad is not None:
            found.append(("gradient", p.grad, path))
        for state in (optimizer.state.get(p, {}) if optimizer else {}).values():
            if torch.is_tensor(state) and state.is_cuda:
                found.append(("optimizer_state", state, path))
    for name, b in model.named_buffers():
        owner, _, _ = name.rpartition(".")
        found.append(("buffer", b, f"{root}/{owner}" if owner else root))
    storages = {t.untyped_storage().data_ptr(): (what, path) for what, t, path in found}
    return [[hex(address), what, path] for address, (what, path) in storages.items()]
