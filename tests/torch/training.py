"""Trains each of the models that the command line names (models.py): two steps as a user would, then one with the ground
truth beside. `--compiled BACKEND` compiles them first; no ground truth then, the wrapper would break the graph."""

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


def train(name, compiled):
    mark(f"model {name}")
    model, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if compiled:
        model.compile(backend=compiled)
    for number in range(2):
        step(f"{name}/{number}", loss, model, optimizer)
    if not compiled:
        mark(f"model {name} truth")
        with GroundTruth(model):
            step(f"{name}/truth", loss, model, optimizer)
    else:
        counters = torch._dynamo.utils.counters
        say(model=name, graphs=counters["stats"]["unique_graphs"], breaks=sum(counters["graph_break"].values()))
        torch._dynamo.reset()
        counters.clear()


words = sys.argv[1:]
backend = words[words.index("--compiled") + 1] if "--compiled" in words else None
for word in words:
    if word in MODELS:
        train(word, backend)
        check(f"{word}/gone")
        torch.cuda.empty_cache()
say(done=True)
