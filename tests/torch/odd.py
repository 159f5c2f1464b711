"""Unusual behaviour of programs: errors that pass through the backward pass, worker processes, a profiler inside the run,
models that die, threads, memory that runs out. Checks after each; prints `done` at the end of a complete training."""

import gc
import sys
import threading

import torch
from models import gpt
from said import check, mark, say


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward pass")


def error():
    model, loss = gpt(layers=1)
    for _ in range(3):
        try:
            Fails.apply(loss()).backward()
            raise SystemExit("nothing was raised")
        except ValueError:
            pass
        model.zero_grad()
    loss().backward()
    check("error/after", gradients=sum(p.grad is not None for p in model.parameters()))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((32,), index, dtype=torch.long)


def workers():
    """Forked workers, and those of a fork server, which CPython 3.14 starts by default."""
    model, _ = gpt(layers=1)
    for way in ("fork", "forkserver"):
        loader = torch.utils.data.DataLoader(
            Rows(), batch_size=4, num_workers=2, pin_memory=True, multiprocessing_context=way
        )
        for words in loader:
            model(words.cuda(non_blocking=True)).sum().backward()
        check(f"workers/{way}")


def profiler():
    model, loss = gpt(layers=1)
    check("profiler/before")
    with torch.profiler.profile(profile_memory=True, with_stack=True) as profile:
        loss().backward()
        check("profiler/inside")
    events = len(profile.events())
    loss().backward()
    check("profiler/after", events=events)


def threads():
    def work(device):
        model, loss = gpt(f"cuda:{device}", layers=1)
        for _ in range(3):
            loss().backward()
        kept.append(model)

    kept = []
    running = [threading.Thread(target=work, args=(device,)) for device in (0, 1, 0)]
    [thread.start() for thread in running]
    [thread.join() for thread in running]
    check("threads/after")


def models_die():
    for number in range(5):
        model, loss = gpt(layers=1 + number % 2)
        loss().backward()
        del model, loss
        gc.collect()
        check(f"models_die/{number}")


def out_of_memory():
    """Three kinds: torch's own limit without a driver call; a failure that a flush repairs; a final failure."""
    gib = 1 << 30
    fill = lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory

    def refused(name, size):
        mark(f"begin {name}")
        try:
            fill(size)
            raise SystemExit(f"{name}: there was memory")
        except torch.cuda.OutOfMemoryError:
            pass
        stats = torch.cuda.memory_stats()
        check(f"oom/{name}", ooms=stats["num_ooms"], retries=stats["num_alloc_retries"])

    # Cached free blocks that are too small for the request: the first driver call fails, the second succeeds.
    cached = [fill(gib) for _ in range(total // gib - 2)]
    del cached
    kept = fill(6 * gib)
    stats = torch.cuda.memory_stats()
    check("oom/mended", ooms=stats["num_ooms"], retries=stats["num_alloc_retries"])
    refused("true", total)
    del kept
    torch.cuda.empty_cache()
    # Must be last: with any fraction set, even 1, torch requests nothing beyond it from the driver.
    torch.cuda.set_per_process_memory_fraction(4 * gib / total)
    refused("limit", 5 * gib)
    check("oom/after")


def main():
    for word in sys.argv[1:]:
        globals()[word]()
        gc.collect()
    say(done=True)


if __name__ == "__main__":
    main()
