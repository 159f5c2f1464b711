"""What a program says to the agent of gpumemd in its own process, and asks of it.

Every function may be called at any time, from any thread, and does nothing where there is no agent: no GPU, no
daemon, no PyTorch is needed. Importing the package lets the wheel's agent in: when CUDA begins, or late if it has begun;
what PyTorch has by then is taken over.

    available(), status()     whether an agent is there and records; how well it sees this process
    scope(name)               what is allocated inside is tagged so: context manager or decorator
    step(), epoch(), phase(name), mark(name)    what the program is doing
    counter(name, value), count(name)   figures of its own
    process_tag(path)         the tag of threads without a scope
    retag(what, path, role)   what a tensor or address is
    watch(model, *optimizers) parameters, gradients and optimizer state of a PyTorch model, exactly
    snapshot()                what this process holds now, as a dict
    peak()                    the highest inside a range, and what it was made of
    report(), last_oom()      the daemon's report of this process so far; its last out-of-memory
    pause(), resume()         CUPTI for another client meanwhile
    paused()                  the same as a context manager or decorator
    record(path), start(), stop(), dump(path)   recordings of this process, with or without a daemon
    muted(), configure(key, value)      what is told, and to whom
    Pool(name)                an allocator of the program's own

``%load_ext gpumem`` shows memory per cell in a notebook. Adapters, imported by name: ``gpumem.torch``, ``gpumem.cupy``,
``gpumem.rmm``, ``gpumem.jax``, ``gpumem.tensorflow``.
"""

from typing import Any, Optional

from ._ask import last_oom, report
from ._library import attach as _attach
from ._library import available
from ._pause import pause, paused, resume
from ._peak import peak
from ._pool import Pool
from ._record import configure, dump, muted, record, start, stop
from ._say import count, counter, epoch, mark, phase, process_tag, retag, step
from ._scope import scope
from ._snapshot import snapshot, status

__all__ = [
    "Pool",
    "available",
    "configure",
    "count",
    "counter",
    "dump",
    "epoch",
    "last_oom",
    "mark",
    "muted",
    "pause",
    "paused",
    "peak",
    "phase",
    "process_tag",
    "record",
    "report",
    "resume",
    "retag",
    "scope",
    "snapshot",
    "start",
    "status",
    "step",
    "stop",
    "watch",
]
__version__ = "0.1.0"


def watch(model: Any, *optimizers: Any, name: Optional[str] = None, every: Optional[int] = None) -> None:
    """Parameters, buffers, gradients and optimizer state of a PyTorch model, exactly: see ``gpumem.torch.watch``."""
    import importlib

    importlib.import_module("gpumem.torch").watch(model, *optimizers, name=name, every=every)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext gpumem``."""
    from ._notebook import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext gpumem``."""
    from ._notebook import unload

    unload(shell)


_attach()
