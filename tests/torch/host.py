"""A typical training for tests/suite/host.rs: its output, exit status and files are the same in each run.

Data comes from worker processes, forked or spawned ones (the argument); in one round a worker fails, in one it is
killed."""

import gc
import multiprocessing
import os
import re
import signal
import sys
import warnings

import torch
from models import gpt
from torch.utils import data
from torch.utils.data import DataLoader, Dataset

HOW = sys.argv[1] if len(sys.argv) > 1 else "fork"
data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # a loader that has failed waits so long for each worker: 5 s else


def say(kind, value, trace):
    """Hides errors of a worker's thread that serves tensors: it reports a closed connection or not, depending on
    timing."""
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, value, trace)


sys.excepthook = say

#: Two batches have arrived, one of each worker. A worker that dies earlier takes the connection along over which its tensors are
#: fetched, and the training ends with a ConnectionError.
SEEN = multiprocessing.get_context(HOW).Event()


class Rows(Dataset):
    def __init__(self, what):
        self.what = what

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5 and self.what == "fails":
            raise ValueError(f"row {index} is invalid")
        if index == 5 and self.what == "dies":
            SEEN.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((32,), index, dtype=torch.long)


def prepare(worker):
    """Gives a spawned worker its own GPU."""
    if HOW == "spawn":
        torch.ones(1000, device="cuda").sum()


def load(what, model, workers):
    # The pinning thread reports a dead worker or not, depending on timing.
    more = {"multiprocessing_context": HOW, "worker_init_fn": prepare, "pin_memory": what != "dies", "timeout": 120}
    loader = DataLoader(Rows(what), batch_size=2, num_workers=workers, **more)
    seen = []
    try:
        for rows in loader:
            seen.append(rows[:, 0].tolist())
            model(rows.cuda(non_blocking=True)).sum().backward()
            if what == "dies" and len(seen) == 2:
                SEEN.set()
    except (ValueError, RuntimeError) as error:
        # The workers' numbers, and the number of batches before one dies, differ in each run.
        first = str(error).splitlines()[0]
        seen = [type(error).__name__, "DataLoader worker" in str(error), re.sub(r"\d+", "N", first) if what == "fails" else ""]
    # A failed loader leaves a reference cycle. If a worker is forked before the cycle is collected, the worker may collect it and
    # then dies ("can only test a child process"). This depends on timing, with an agent or without.
    gc.collect()
    print(what, *seen, flush=True)


def main():
    torch.manual_seed(7)
    model, loss = gpt(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = torch.cuda.memory_stats()  # before a worker dies, which takes as long as it takes
    print("allocations", stats["allocation.all.allocated"], "bytes", stats["allocated_bytes.all.peak"], flush=True)
    if HOW == "spawn":  # each one loads PyTorch for seconds
        load("rows", model, 1)
    else:
        for what in ("rows", "fails", "dies", "rows"):
            load(what, model, 2)
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, "model.pt")
    handled = [number for number in range(1, 32) if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)]
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) < 3)
    print("signals", *handled, "descriptors", *descriptors, flush=True)
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        print("no room", flush=True)
    sys.exit(5)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
