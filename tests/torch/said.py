"""A program's own figures, for comparison with a recording of it.

`check(name)` puts a mark into the stream of events and prints torch's own figures of that moment. `GroundTruth` puts marks
around calls of modules, by a wrapper around `nn.Module.__call__`, and around nodes of the backward pass: slow, simple and
right by construction. Neither is part of gpumem, which does not recognise them.
"""

import contextlib
import ctypes
import json
import os
import sys
import threading
import time

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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


def blocks(device=None):
    """Live blocks by address, as torch rounded them; of one device or all."""
    found = {}
    for segment in torch.cuda.memory_snapshot():
        if device not in (None, segment["device"]):
            continue
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[at] = block["size"]
            at += block["size"]
    return found


def agent():
    """Returns the agent's Python core in this process, or None."""
    package = sys.modules.get("_gpumem_torch")
    return getattr(getattr(package, "_core", None), "_core", None)


#: Seconds. On a busy machine the agent's first scan of modules takes 0.1 s or more, and the next may start after 500
#: times that.
PATIENCE = 200


def until(what, condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def storage(tensor):
    """Returns the address of the tensor's storage; for a DTensor, of its local tensor's."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def path_of(root, name):
    """Returns the path of a module: `GPT/h.3/attn` for `h.3.attn`. A number stays with its container."""
    path = root
    for part in name.split(".") if name else []:
        path += ("." if part.isdigit() else "/") + part
    return path


class Claims(TorchFunctionMode):
    """Assigns the backward nodes that a call creates to the module that this thread is in. Affects one thread."""

    def __init__(self, truth):
        super().__init__()
        self.truth = truth

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.truth.claim(result)
        return result


class GroundTruth:
    """Marks module calls and backward nodes while it is entered.

    Prints `enter PATH` and `leave` around every call of one of the model's modules, and around every backward node that was
    created in one, each on its own thread (where checkpoints are also recomputed). Calls inside a compiled module are not
    seen: they count as that module's. `claims`: see there. A backward pass inside a node (of a checkpoint) is `enter ?`:
    gradients that the engine accumulates between two of its nodes belong to no module."""

    def __init__(self, model, claims=True):
        root, self.claims = type(model).__name__, claims
        self.paths = {id(m): path_of(root, name) for name, m in model.named_modules()}
        self.local, self.seen, self.hooks = threading.local(), {}, []

    def stack(self):
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        return self.local.stack

    def claim(self, tensors):
        """Claims the unclaimed nodes that lead to these tensors."""
        if not self.stack():
            return
        path = self.stack()[-1]
        tensors = tensors if isinstance(tensors, (tuple, list)) else [tensors]
        waiting = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor)]
        while waiting:
            node = waiting.pop()
            if node is None or node in self.seen or node.name().endswith("AccumulateGrad"):
                continue
            self.seen[node] = path
            self.hooks.append(node.register_prehook(lambda _: mark(f"enter {path}")))
            self.hooks.append(node.register_hook(lambda *_: mark("leave")))
            waiting += [following for following, _ in node.next_functions]

    def __enter__(self):
        self.original = original = nn.Module.__call__

        def call(module, *arguments, **keywords):
            path = self.paths.get(id(module))
            if path is None:
                return original(module, *arguments, **keywords)
            self.claim(arguments)  # what the caller has made by other ways than torch's functions
            stack = self.stack()
            claims = Claims(self) if self.claims and not stack else contextlib.nullcontext()
            stack.append(path)
            mark(f"enter {path}")
            try:
                with claims:
                    result = original(module, *arguments, **keywords)
                self.claim(result)
                return result
            finally:
                mark("leave")
                stack.pop()

        self.backward = outer_backward = torch.autograd.backward

        def backward(*arguments, **keywords):
            if threading.current_thread() is threading.main_thread():
                return outer_backward(*arguments, **keywords)
            mark("enter ?")
            try:
                return outer_backward(*arguments, **keywords)
            finally:
                mark("leave")

        nn.Module.__call__ = call
        torch.autograd.backward = backward
        return self

    def __exit__(self, *_):
        nn.Module.__call__ = self.original
        torch.autograd.backward = self.backward
        for hook in self.hooks:
            hook.remove()


def addresses(model, optimizer=None):
    """Returns storages by address: kind, owning module, and name there."""
    root, found = type(model).__name__, []
    for name, p in model.named_parameters():
        found.append(("parameter", p, name))
        if p.grad is not None:
            found.append(("gradient", p.grad, name))
        for state in (optimizer.state.get(p, {}) if optimizer else {}).values():
            if torch.is_tensor(state) and state.is_cuda:
                found.append(("optimizer_state", state, name))
    found += [("buffer", b, name) for name, b in model.named_buffers()]
    storages = {t.untyped_storage().data_ptr(): (what, name) for what, t, name in found}
    rows = []
    for address, (what, name) in storages.items():
        owner, _, own = name.rpartition(".")
        rows.append([hex(address), what, path_of(root, owner), own])
    return rows
