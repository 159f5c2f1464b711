"""Optimizers' steps: the phase, the number of the step, and when to look at parameters, gradients and states."""

import os
import sys
import weakref
from typing import Any, Dict, List, Optional, Tuple

from . import _codes
from ._agent import FORWARD, OPTIMIZER, functions, text
from ._modules import Modules
from ._sweep import Sweeper

#: Steps of an optimizer after which everything was seen that it will make.
_FIRST = 3
#: Seconds in the process's life for sweeps and searches that are made at once, because an optimizer is new, and not when
#: the time since the last one has paid for them: a program may make an optimizer for each parameter, or for each step.
_AT_ONCE = 2.0


def _never() -> bool:
    return False


class Steps:
    """The hooks of all optimizers."""

    def __init__(self, modules: Modules, sweeper: Sweeper) -> None:
        self.modules = modules
        self.sweeper = sweeper
        self._optimizers: Dict[int, Any] = {}
        self._done: Dict[int, int] = {}
        #: Its steps are the program's steps.
        self._first: Optional[Any] = None
        self.count = 0
        #: In steps with a multiple of this number names of gradients are looked up, whatever that costs; 0: in none.
        self.every = 0
        self._inside = False
        #: What is left of _AT_ONCE.
        self._left = _AT_ONCE
        #: A forked child does nothing: the agent is silent there.
        self.process = os.getpid()
        torch = sys.modules.get("torch")
        compiler = getattr(torch, "compiler", None)
        self.is_compiling = getattr(compiler, "is_compiling", None) or _never

    def optimizers(self) -> List[Any]:
        """Those that live."""
        found = [reference() for reference in list(self._optimizers.values())]
        return [optimizer for optimizer in found if optimizer is not None]

    def add(self, optimizer: Any) -> None:
        """An optimizer is known from now on."""
        key = id(optimizer)
        known = self._optimizers.get(key)
        if known is not None and known() is optimizer:
            return
        self._optimizers[key] = weakref.ref(optimizer, lambda gone: self._gone(key, gone))
        self._done[key] = 0
        if self._first is None or self._first() is None:
            self._first = self._optimizers[key]
        kind = type(optimizer)
        _codes.register_optimizer(kind)
        _codes.register_others()
        # What a step allocates for itself is the optimizer's.
        functions.module(key, id(kind), 0, text(kind.__name__ + ".step"))
        self.sweeper.forget()
        if self._has_unknown(optimizer):
            self._sweep([], False)
            # Modules that no hook has shown: unpickled, or deep copies.
            if self._has_unknown(optimizer) and (self._left > 0 or self.modules.is_due()):
                self.modules.search()
                self._left -= self.modules.search_seconds

    def _gone(self, key: int, reference: Any) -> None:
        """An optimizer has died, possibly while the interpreter ends."""
        try:
            if self._optimizers.get(key) is reference:
                del self._optimizers[key], self._done[key]
                functions.module_gone(key)
        except Exception:  # names of this module may be gone by now
            pass

    def _has_unknown(self, optimizer: Any) -> bool:
        """Whether it has parameters that no sweep has seen."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return any(id(param) not in self.sweeper.paths for param in params)

    def _sweep(self, optimizers: List[Any], gradients: bool) -> None:
        """Now, if that is paid for, or as long as the program's first optimizers may have it for nothing."""
        is_due = self.sweeper.is_due()
        if is_due or self._left > 0:
            self.sweeper.sweep(optimizers, gradients)
            if not is_due:
                self._left -= self.sweeper.seconds

    def before(self, optimizer: Any) -> None:
        """A step begins."""
        functions.phase(OPTIMIZER)
        if self._inside or os.getpid() != self.process:
            return
        self._inside = True
        try:
            self.add(optimizer)
            done = self._done[id(optimizer)]
            if self.every and functions.step_number() % self.every == 0:
                self.sweeper.sweep(self.optimizers(), True)
            elif done < _FIRST or self.sweeper.is_due():
                self._sweep(self.optimizers(), True)
        finally:
            self._inside = False

    def after(self, optimizer: Any) -> None:
        """It has ended."""
        functions.phase(FORWARD)
        if self._inside or os.getpid() != self.process:
            return
        self._inside = True
        try:
            if self._first is not None and self._first() is optimizer:
                self.count += 1
                functions.auto_step(self.count)
            done = self._done.get(id(optimizer), 0)
            self._done[id(optimizer)] = done + 1
            if done < _FIRST:  # states are made in the first step
                self._sweep(self.optimizers(), False)
        finally:
            self._inside = False


def hooks(steps: Steps) -> Tuple[Any, Any]:
    """Two functions as PyTorch calls them. What is being compiled must see nothing of them."""
    is_compiling = steps.is_compiling

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        try:
            steps.before(optimizer)
        except Exception:
            pass

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        try:
            steps.after(optimizer)
        except Exception:
            pass

    return before, after
