"""Trains each of the models named on the command line (models.py): two plain steps, then one with the ground truth.

`--compiled BACKEND` compiles whole models first, `--parts BACKEND` each of their parts separately."""

import sys

import torch
from models import MODELS
from said import GroundTruth, addresses, check, mark, say


def step(name, loss, model, optimizer):
    mark("phase forward")
    value = loss()
    mark("phase backward")
    value.backward()
    mark("phase none")
    check(f"{name}/backward", addresses=addresses(model, optimizer))
    mark("phase optimizer")
    optimizer.step()
    mark("phase none")
    check(f"{name}/optimizer", addresses=addresses(model, optimizer))
    optimizer.zero_grad()


def parts(model):
    """Yields the modules that the model's forward function calls."""
    for child in model.children():
        yield from child if isinstance(child, torch.nn.ModuleList) else [child]


def graphs():
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def train(name, backend, whole):
    mark(f"model {name}")
    model, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend:
        for module in [model] if whole else parts(model):
            module.compile(backend=backend)
    for number in range(2):
        step(f"{name}/{number}", loss, model, optimizer)
    before = backend and graphs()
    mark(f"model {name} truth")
    # A torch function mode would cause recompilation.
    with GroundTruth(model, claims=not backend):
        step(f"{name}/truth", loss, model, optimizer)
    if backend:
        say(model=name, **before, with_truth=graphs())
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


words = sys.argv[1:]
whole = "--compiled" in words
backend = next((how for what, how in zip(words, words[1:]) if what in ("--compiled", "--parts")), None)
for word in words:
    if word in MODELS:
        train(word, backend, whole)
        check(f"{word}/gone")
        torch.cuda.empty_cache()
say(done=True)
