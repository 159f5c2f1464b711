"""Trains over two epochs and prints torch's own figures of every parameter and gradient for each iteration.

They are compared with the iteration table with a column for each (`tests/suite/torch/parameters.rs`).

    parameters.py steps EVERY       the program numbers its steps: gpumem.step()
    parameters.py optimizer EVERY   it does not: the optimizer's steps are the program's

    each iteration prints: `epoch`, `iteration`, bytes by path in `parameters` and `gradients`, torch's `reserved` at its end
"""

import sys

import gpumem
import torch
from models import GPT
from said import blocks, path_of, say, storage

EPOCHS, ITERATIONS = 2, 5


def sizes(named):
    """Bytes of each one's block, as torch rounded them."""
    live = blocks()
    return {path_of("GPT", name): live[storage(tensor)] for name, tensor in named}


def main():
    how, every = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(3)
    model = GPT(layers=2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gpumem.watch(model, optimizer, name="GPT", every=every)
    numbered = how == "steps"
    for epoch in range(1, EPOCHS + 1):
        assert gpumem.epoch() == epoch
        if epoch == 2:
            # Frozen parameters have no gradients from now on.
            model.h[0].requires_grad_(False)
        for iteration in range(1, ITERATIONS + 1) if numbered else range(ITERATIONS):
            if numbered:
                assert gpumem.step().number == iteration
            words = torch.randint(0, 100, (2, 16), device="cuda")
            model(words).square().mean().backward()
            parameters = sizes(model.named_parameters())
            gradients = sizes((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            optimizer.step()
            reserved = torch.cuda.memory_reserved()
            if numbered:
                # Only here: in the other mode, the optimizer's step has already begun the next iteration.
                optimizer.zero_grad()
            say(epoch=epoch, iteration=iteration, parameters=parameters, gradients=gradients, reserved=reserved)
            if not numbered:
                optimizer.zero_grad()
    gpumem.step()  # the last one is over, too
    say(done=True)


if __name__ == "__main__":
    main()
