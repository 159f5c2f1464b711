"""Names of PyTorch modules and tensors: models, parameters, gradients, optimizer state.

Under ``gpumemctl run`` no call is needed: the agent finds modules and optimizers. ``watch`` names a model, and makes the
names of its parameters, gradients and optimizer states exact from the call on::

    model, optimizer = Net().cuda(), torch.optim.AdamW(...)
    gpumem.torch.watch(model, optimizer, name="student")

Without an agent both functions do nothing. Neither raises, changes the model, or keeps it alive.
"""

import sys
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    import torch

__all__ = ["unwatch", "watch"]

#: The agent carries its own copy of this package under a private name; the copy that starts first does the work.
_PRIVATE = "_gpumem_torch"


def _working() -> Any:
    """Returns the active core of this process; ``None`` without an agent."""
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
    """Names the memory of ``model``, and the state that ``optimizers`` hold for it.

    ``name`` is the first part of all its modules' paths; ``None`` means the model's class. May be called at any time, also
    again after parameters have changed.

    Costs a few microseconds for each parameter. Later, at most 0.2 % of the time between two optimizer steps is spent on
    looking up names of new gradients. In other steps a gradient gets its parameter's name when it is accumulated, or its
    module's name right after modules have moved. ``every=N`` looks up every gradient in each step whose number is a multiple
    of N, at any cost, for ``gpumemctl report --iterations --csv --columns --every N``. ``every=0`` turns this off.
    """
    try:
        core = _working()
        if core is not None:
            # An older copy in the agent has no parameter `every`.
            more = () if every is None else (every,)
            core.watch(model, optimizers, name, *more)
    except Exception:
        pass


def unwatch(model: "torch.nn.Module") -> None:
    """Stops naming ``model`` and its parts. Memory that already has a name keeps it."""
    try:
        core = _working()
        if core is not None:
            core.unwatch(model)
    except Exception:
        pass
