"""PyTorch's modules and tensors by name: models, parameters, gradients, optimizer state.

Under ``gpumemctl run`` nothing has to be called: the agent finds modules and optimizers by itself. ``watch`` says which
model matters, names it, and makes its parameters, gradients and optimizer states known at once and exactly::

    model, optimizer = Net().cuda(), torch.optim.AdamW(...)
    gpumem.torch.watch(model, optimizer, name="student")

Where there is no agent, both functions do nothing. None of them raises, changes the model, or keeps it alive.
"""

import sys
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    import torch

__all__ = ["unwatch", "watch"]

#: The agent has its own copy of this package, under a private name: whichever came first does the work.
_PRIVATE = "_gpumem_torch"


def _working() -> Any:
    """The one that works in this process; ``None`` where there is no agent."""
    here = sys.modules[__name__]
    one = sys.modules.setdefault(_PRIVATE, here)
    core = getattr(one, "_core", None)
    if core is not None and core.core() is not None:
        return core
    return _begin() if one is here else None


def _begin() -> Any:
    from .. import _library
    from . import _core
    from ._agent import exported

    found = _library.library()
    if found is None:
        return None
    _core.start(exported(found.handle))
    return _core if _core.core() is not None else None


def watch(
    model: "torch.nn.Module",
    *optimizers: "torch.optim.Optimizer",
    name: Optional[str] = None,
    every: Optional[int] = None,
) -> None:
    """Names the memory of ``model``, and of what ``optimizers`` keep for it.

    ``name`` is the first part of the paths of all its modules; without one it is the model's class. May be called at any
    time, also again after parameters have changed. Costs some microseconds for each parameter, and later at most 0.2 %
    of the time between two steps of an optimizer: in that time the names of new gradients are looked up. In other steps a
    gradient has its parameter's name as soon as it is accumulated, or its module's name while modules have just moved.
    With ``every=N`` each gradient has its parameter's name in all steps whose number is a multiple of N, whatever that
    costs: for ``gpumemctl report --iterations --csv --columns --every N``. ``every=0`` ends that.
    """
    try:
        core = _working()
        if core is not None:
            # One of an older library knows nothing of `every`.
            more = () if every is None else (every,)
            core.watch(model, optimizers, name, *more)
    except Exception:
        pass


def unwatch(model: "torch.nn.Module") -> None:
    """Forgets the names of ``model`` and its parts. What was named stays named."""
    try:
        core = _working()
        if core is not None:
            core.unwatch(model)
    except Exception:
        pass
