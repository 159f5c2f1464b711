"""Scopes, steps and marks in code compiled by torch.compile: one graph, no break, the same result. Prints `ok`."""

import os
import sys

sys.path.insert(0, os.environ["GPUMEM_PACKAGE"])

import gpumem

with gpumem.scope("before torch is there"):
    pass

import torch
import torch._dynamo


@gpumem.scope("decorated")
def double(x):
    return x * 2


def step(x):
    with gpumem.scope("outer"):
        y = torch.relu(x)
        with gpumem.scope("inner"):
            y = y + 1
        y = double(y)
    with gpumem.step(), gpumem.phase("forward"):
        gpumem.mark("here")
        gpumem.counter("batch", 8)
        gpumem.retag(y, "y", "activation")
        return y + 1


x = torch.randn(8)
assert gpumem.available()
compiled = torch.compile(step, backend="eager", fullgraph=True)
assert torch.equal(compiled(x), step(x))
explained = torch._dynamo.explain(step)(x)
assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained
numbers = gpumem.step().number
compiled(x)
assert gpumem.step().number == numbers + 1, "compiled code reports no step"
print("ok")
