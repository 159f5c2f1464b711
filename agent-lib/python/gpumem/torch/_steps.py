"""Optimizer steps: the phase, the step number, and when to sweep parameters, gradients and states."""

import os
import sys
import time
import weakref
from typing import Any, Dict, List, Optional, Set, Tuple

from . import _codes
from ._agent import FORWARD, OPTIMIZER, functions, text
from ._changes import Allowance
from ._modules import Modules
from ._objects import classes, instances
from ._sweep import Sweeper

#: Steps after which an optimizer has created all of its state.
_FIRST = 3


def _never() -> bool:
    return False


class Steps:
    """Hooks shared by all optimizers."""

    def __init__(self, modules: Modules, sweeper: Sweeper) -> None:
        self.modules = modules
        self.sweeper = sweeper
        #: Optimizers by object address, and the number of steps of each.
        self.known: Dict[int, Any] = {}
        self.done: Dict[int, int] = sweeper.done
        #: For each optimizer, the value of `count` when it was registered.
        self.added: Dict[int, int] = {}
        #: The optimizer whose steps count as the program's steps.
        self.first: Optional[Any] = None
        #: Addresses of the other optimizers that made a step since its last one.
        self.others: Set[int] = set()
        #: Number of its last steps without a step of another optimizer in between.
        self.alone = 0
        self.count = 0
        #: Gradients are looked up at any cost in steps that are a multiple of this; 0 disables it.
        self.every = 0
        #: Number of hooked optimizer classes at the last search.
        self.hooked = 0
        #: Set while a sweep runs, and in a forked child, where the agent is inactive.
        self.rests = False
        os.register_at_fork(after_in_child=self._rest)
        #: Whether something changed since the last sweep of gradients: gradients accumulated meanwhile may have the name of
        #: a module that is not their parameter's.
        self.owes_gradients = False
        #: For sweeps and searches after changes.
        self._allowance = Allowance()
        torch = sys.modules.get("torch")
        compiler = getattr(torch, "compiler", None)
        self.is_compiling = getattr(compiler, "is_compiling", None) or _never

    def optimizers(self) -> List[Any]:
        """Returns the live optimizers."""
        found = [reference() for reference in list(self.known.values())]
        return [optimizer for optimizer in found if optimizer is not None]

    def add(self, optimizer: Any) -> None:
        """Registers an optimizer."""
        key = id(optimizer)
        known = self.known.get(key)
        if known is not None and known() is optimizer:
            return
        self.known[key] = weakref.ref(optimizer, lambda gone: self._gone(key, gone))
        self.done[key], self.added[key] = 0, self.count
        kind = type(optimizer)
        _codes.register_optimizer(kind)
        _codes.register_others()
        # Memory that a step allocates belongs to the optimizer.
        functions.module(key, id(kind), 0, text(kind.__name__ + ".step"))
        self.sweeper.forget()
        if self._has_unknown(optimizer):
            self._sweep([], False)
            # Modules that no hook has reported: unpickled or deep-copied ones.
            if self._has_unknown(optimizer) and (self.modules.is_due() or self._allowance.is_left()):
                self.modules.search()
                self._allowance.spend(self.modules.search_seconds)

    def _gone(self, key: int, reference: Any) -> None:
        """Removes an optimizer that has died, possibly during interpreter shutdown."""
        try:
            if self.known.get(key) is reference:
                del self.known[key], self.done[key], self.added[key]
                self.others.discard(key)
                self.sweeper.states.pop(key, None)
                functions.module_gone(key)
        except Exception:  # names of this module may be gone by now
            pass

    def counts(self, optimizer: Any, key: int, number: int) -> bool:
        """Returns whether a step of an optimizer, its `number`-th, is a step of the program.

        Of optimizers that take turns, one counts. Another one replaces it when it makes two steps in a row, when it begins
        after several steps of the first alone, as after a restart, or when it was made for the same parameters since.
        """
        first = self.first() if self.first is not None else None
        if first is optimizer:
            self.alone = 0 if self.others else self.alone + 1
        elif first is None or key in self.others or (number == 0 and (self.alone > 1 and not self.others or self._replaces(optimizer, first))):
            self.first, self.alone = self.known.get(key), 1
        else:
            self.others.add(key)
            return False
        self.others.clear()
        return True

    def _replaces(self, optimizer: Any, first: Any) -> bool:
        """Returns whether an optimizer has the parameters of `first`, and was registered after the last step.

        A wrapper of an optimizer has its parameters, too, and is registered before the step of the wrapped optimizer.
        """
        own, other = (next((param for group in one.param_groups for param in group["params"]), None) for one in (optimizer, first))
        return own is not None and own is other and self.added.get(id(optimizer)) == self.count

    def _has_unknown(self, optimizer: Any) -> bool:
        """Returns whether the optimizer has parameters that no sweep has seen."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return any(id(param) not in self.sweeper.paths for param in params)

    def _sweep(self, optimizers: List[Any], gradients: bool) -> None:
        """Sweeps if a sweep is due, or while the allowance lasts."""
        is_due = self.sweeper.is_due()
        if is_due or self._allowance.is_left():
            self.sweeper.sweep(optimizers, gradients)
            self.owes_gradients = self.owes_gradients and not gradients
            if not is_due:
                self._allowance.spend(self.sweeper.cpu_seconds)

    def look(self, optimizer: Any) -> None:
        """Handles the start of a step in which something may be new or a sweep is due."""
        if self.rests:
            return
        self.rests = True
        try:
            self.add(optimizer)
            done = self.done[id(optimizer)]
            has_changed = self._has_changed() or self.sweeper.changed()
            if self.every and functions.step_number() % self.every == 0:
                self.sweeper.sweep(self.optimizers(), True)
            elif has_changed or self.owes_gradients or done < _FIRST or self.sweeper.is_due():
                self.owes_gradients = True
                self._sweep(self.optimizers(), True)
        finally:
            self.rests = False

    def _has_changed(self) -> bool:
        """Returns whether modules moved or an optimizer has a different state since the last sweep, as after
        `load_state_dict`."""
        is_due = time.perf_counter() >= self.modules.due
        has_moved = self.modules.follow()
        start = time.thread_time()
        has_others = self.sweeper.has_other_states(self.optimizers(), is_due)
        if is_due:
            self.modules.pay(time.thread_time() - start)
        return has_moved or has_others

    def scan_between_statements(self) -> None:
        """Scans between two statements: the program may load a model or state and make no step for a while, or never."""
        if self.rests:
            return
        self.rests = True
        try:
            count = _codes.count_hooked()
            if count != self.hooked and self.modules.is_due():
                self.search()
            if self._has_changed() or self.sweeper.changed():
                self.owes_gradients = True
                self._sweep(self.optimizers(), False)
        finally:
            self.rests = False

    @staticmethod
    def kinds() -> List[type]:
        """Returns the classes of optimizers."""
        kind = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
        return classes(kind) if kind is not None else []

    def search(self, objects: Optional[List[Any]] = None) -> None:
        """Searches all objects, or only the given optimizers. PyTorch reports an optimizer only when it makes a step."""
        start = time.perf_counter()
        self.hooked = _codes.count_hooked()
        for optimizer in instances(self.kinds()) if objects is None else objects:
            if "param_groups" in object.__getattribute__(optimizer, "__dict__"):
                self.add(optimizer)
        self.modules.searched_at = time.perf_counter()
        self.modules.search_seconds += self.modules.searched_at - start

    def sweep_states(self) -> None:
        """Sweeps after one of an optimizer's first steps, or a step that created state."""
        self.rests = True
        try:
            self._sweep(self.optimizers(), False)
        finally:
            self.rests = False

    def _rest(self) -> None:
        self.rests = True


def hooks(steps: Steps) -> Tuple[Any, Any]:
    """Returns the pre-step and post-step hooks for PyTorch.

    They do nothing while Dynamo traces. The program evicts CPU caches between two steps, so each Python call here costs
    microseconds: a step without changes and without a closure makes none.
    """
    is_compiling, sweeper, clock, modules = steps.is_compiling, steps.sweeper, time.perf_counter, steps.modules
    known, done, states, fields = steps.known, steps.done, sweeper.states, object.__getattribute__

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        try:
            functions.phase(OPTIMIZER)
            key = id(optimizer)
            reference = known.get(key)
            is_known = reference is not None and reference() is optimizer
            state = fields(optimizer, "__dict__").get("state")
            has_changed = sweeper.version != modules.version or (state is not None and states.get(key) != (id(state), len(state)))
            if not is_known or has_changed or steps.owes_gradients or steps.every or done[key] < _FIRST or clock() >= min(sweeper.due, modules.due):
                steps.look(optimizer)
            # Last, because reading the attributes of the program's object may fail.
            if len(args) > 1 or kwargs:
                _codes.register_closure(args[1] if len(args) > 1 else kwargs.get("closure"))
        except Exception:
            pass

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        try:
            functions.phase(FORWARD)
            if steps.rests:
                return
            key = id(optimizer)
            number = done.get(key, 0)
            first = steps.first
            if first is not None and first() is optimizer and not steps.others:
                is_step = True  # the usual case, without a call of Python code
                steps.alone += 1
            else:
                is_step = steps.counts(optimizer, key, number)
            if is_step:
                steps.count += 1
                functions.auto_step(steps.count)
            done[key] = number + 1
            state = fields(optimizer, "__dict__").get("state")
            if number < _FIRST or (state is not None and states.get(key) != (id(state), len(state))):
                steps.sweep_states()
        except Exception:
            pass

    return before, after
