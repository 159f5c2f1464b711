"""Names, marks and records the GPU memory of this process through the gpumemd agent.

Every function may be called at any time and from any thread. Without an agent it does nothing; no GPU, daemon or
PyTorch is required. Importing the package makes CUDA load the wheel's agent when it is initialised. If CUDA is already
initialised the agent is loaded at once, and takes over the blocks that PyTorch already holds.

    available(), status()     whether an agent is loaded and recording; how completely it sees this process
    scope(name)               tags allocations made inside: context manager or decorator
    step(), epoch(), phase(name), mark(name)    mark the program's progress
    counter(name, value), count(name)   the program's own counters
    process_tag(path)         tag for threads without an open scope
    retag(what, path, role)   sets the name and role of a tensor or address
    watch(model, *optimizers) names parameters, gradients and optimizer state of a PyTorch model exactly
    snapshot()                current memory of this process, as a dict
    peak()                    highest memory inside a range, and its composition
    report(), last_oom()      the daemon's report of this process; its last out-of-memory event
    pause(), resume()         release CUPTI to another client, and take it back
    paused()                  the same as a context manager or decorator
    record(path), start(), stop(), dump(path)   write recordings of this process, with or without a daemon
    muted(), configure(key, value)      choose what the agent records and sends
    Pool(name)                reports the program's own allocator

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
    """Names parameters, buffers, gradients and optimizer state of a PyTorch model exactly: see
    ``gpumem.torch.watch``."""
    import importlib

    importlib.import_module("gpumem.torch").watch(model, *optimizers, name=name, every=every)


def load_ipython_extension(shell: Any) -> None:
    """Enables one line for each notebook cell: ``%load_ext gpumem``."""
    from ._notebook import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Removes it again: ``%unload_ext gpumem``."""
    from ._notebook import unload

    unload(shell)


_attach()
