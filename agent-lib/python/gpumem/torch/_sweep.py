"""Finds the storages of parameters, copies, buffers, gradients, optimizer states and caches, and names them.

A sweep sends the agent only changes. It runs in the hooks of an optimizer step or between two statements of the main
thread, never in a module's call. Its duration is measured. The next sweep waits until this one amounts to 0.2 % of the
elapsed time, or to 0.05 % after many sweeps without changes.
"""

import sys
import time
from itertools import chain
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from . import _copies
from ._agent import BUFFER, GRADIENT, KV_CACHE, OPTIMIZER_STATE, PARAMETER, PARAMETER_COPY, functions, text
from ._caches import MODULES as CACHE_MODULES
from ._caches import Caches
from ._models import Models
from ._modules import Known, Modules

#: Share of time; share of time after this many sweeps in a row that reported only gradients.
_SHARE, _SHARE_WHEN_STILL, _STILL = 0.002, 0.0005, 20
#: Seconds after which unchanged names are sent again.
_LASTS = 10.0
#: Maximum nesting of tensors.
_DEEPEST = 4


def _parts(tensor: Any, depth: int = 0) -> Iterator[Any]:
    """Yields the tensors with memory: the local tensor of a DTensor, the components of other tensor subclasses."""
    kind = type(tensor)
    if kind in _plain():
        yield tensor
        return
    if depth > _DEEPEST or hasattr(kind, "fake_mode") or kind.__name__ in ("FakeTensor", "FunctionalTensor"):
        return
    inner = getattr(tensor, "_local_tensor", None)
    if inner is not None:
        yield from _parts(inner, depth + 1)
        return
    flatten = getattr(kind, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten(tensor)[0]:
        yield from _parts(getattr(tensor, name), depth + 1)


_plain_kinds: Tuple[type, ...] = ()


def _plain() -> Tuple[type, ...]:
    global _plain_kinds
    if not _plain_kinds:
        torch = sys.modules["torch"]
        _plain_kinds = (torch.Tensor, torch.nn.Parameter)
    return _plain_kinds


def _storage(tensor: Any) -> int:
    """Returns the device address of a tensor's storage; 0 without one."""
    if not tensor.is_cuda:
        return 0
    untyped = getattr(tensor, "untyped_storage", None)
    if untyped is not None:
        return int(untyped().data_ptr())
    return int(tensor.storage().data_ptr())  # before PyTorch 2.0


def addresses(tensor: Any) -> List[int]:
    """Returns the device addresses of all storages of a tensor."""
    try:
        found = [_storage(part) for part in _parts(tensor)]
    except Exception:  # none so far, or a kind of tensor that says nothing of it
        return []
    return [address for address in found if address]


def _common(one: str, other: str) -> str:
    """Returns the common leading components of two paths."""
    parts = []
    for left, right in zip(one.split("/"), other.split("/")):
        if left != right:
            break
        parts.append(left)
    return "/".join(parts)


def _values(states: List[Any]) -> int:
    """Returns a hash that changes with the values in optimizer states. Uses only functions written in C."""
    try:
        return hash(tuple(map(id, chain.from_iterable(map(dict.values, chain.from_iterable(map(dict.values, states)))))))
    except Exception:  # states of another form
        return 0


class Sweeper:
    """Runs sweeps and keeps the names they have sent."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self.caches = Caches()
        #: Sizes by element type, in sweeps that find other modules, optimizers or states; else `None`.
        self._sizes: Optional[Models] = None
        #: Step counts of optimizers, by object address.
        self.done: Dict[int, int] = {}
        #: Keys of modules that are copies of trained ones.
        self._copies: Set[int] = set()
        #: Cache storage address -> address of the tensor object. A new tensor object is sent again.
        self._cached: Dict[int, int] = {}
        #: Parameter paths by object address.
        self.paths: Dict[int, str] = {}
        #: Names sent so far: storage address -> path and role. A new tensor may reuse the address of a freed one with
        #: the same name. So everything is sent again after modules or optimizers changed, and from time to time.
        self._sent: Dict[int, Tuple[str, int]] = {}
        self._forget_at = 0.0
        #: Version of the modules at the last sweep.
        self.version = -1
        #: Time of the next sweep.
        self.due = 0.0
        self._ended = 0.0
        #: Number of sweeps; duration and CPU time of the last one in seconds.
        self.count = 0
        self.seconds = self.cpu_seconds = 0.0
        #: Result of the last sweep, and the number of sweeps in a row that found nothing new except gradients.
        self._last: Dict[int, Tuple[str, int]] = {}
        self._still = 0
        #: For each optimizer, by its address: address of its state and number of parameters in it. Then a hash of all
        #: state values.
        self.states: Dict[int, Tuple[int, int]] = {}
        self._values = hash(())
        #: Number of storages found, by role.
        self.found: Dict[int, int] = {}

    def is_due(self) -> bool:
        """Returns whether the next sweep is due."""
        return time.perf_counter() >= self.due

    def age(self) -> float:
        """Returns the seconds since the last sweep."""
        return time.perf_counter() - self._ended

    def changed(self) -> bool:
        """Returns whether modules or parameters changed since the last sweep."""
        return self.version != self.modules.version

    def forget(self) -> None:
        """Makes the next sweep send everything, because addresses may have been freed and reused."""
        self._sent = {}
        self._forget_at = time.perf_counter() + _LASTS

    def has_other_states(self, optimizers: List[Any], is_thorough: bool) -> bool:
        """Returns whether optimizers have other states than at the last sweep; `is_thorough` also compares the state values."""
        states = [object.__getattribute__(optimizer, "__dict__").get("state") for optimizer in optimizers]
        for optimizer, state in zip(optimizers, states):
            if state is not None and self.states.get(id(optimizer)) != (id(state), len(state)):
                return True
        return is_thorough and bool(optimizers) and self._values != _values(states)

    def sweep(self, optimizers: List[Any], gradients: bool) -> None:
        """Sends new names. Gradients are always sent, because a block at the same address may be a new one."""
        start, cpu_start = time.perf_counter(), time.thread_time()
        storages: Dict[int, Tuple[str, int]] = {}
        torch = sys.modules["torch"]
        # No mode of the program sees these queries.
        with torch._C.DisableTorchFunction():
            self.modules.update_classes()
            self.modules.follow(True)
            if self.version != self.modules.version or start > self._forget_at:
                self.forget()
            self.version = self.modules.version
            self.paths = {}
            describes = not self._sent or self.has_other_states(optimizers, False)
            self._sizes = Models(_parts, optimizers) if describes else None
            self._copies = self._find_copies(optimizers, gradients)
            cached = self._take_caches(storages)
            for module, known in self.modules:
                self._module(module, known, storages, gradients)
            states = [object.__getattribute__(optimizer, "__dict__").get("state") for optimizer in optimizers]
            if optimizers:
                self._values = _values(states)
            for optimizer, state in zip(optimizers, states):
                if state is not None:
                    self.states[id(optimizer)] = (id(state), len(state))
                self._optimizer(optimizer, storages, gradients)
            if self._sizes is not None:
                self._sizes.send()
        sent, last, is_still = self._sent, self._last, True
        for address, (path, role) in storages.items():
            is_other = role == KV_CACHE and cached.get(address) != self._cached.get(address)
            if role == GRADIENT or is_other or sent.get(address) != (path, role):
                functions.retag(0, address, text(path), role, 0)
            is_still = is_still and (role == GRADIENT or last.get(address) == (path, role))
        functions.parameters_named()
        self._still = self._still + 1 if is_still else 0
        # Keep only current storages: an address that reappears is sent again.
        self._sent = self._last = storages
        self._cached = cached
        self.found = {}
        for _, role in storages.values():
            self.found[role] = self.found.get(role, 0) + 1
        self.count += 1
        now = time.perf_counter()
        self.seconds, self.cpu_seconds = now - start, time.thread_time() - cpu_start
        self._ended = now
        self.due = now + self.seconds / (_SHARE_WHEN_STILL if self._still >= _STILL else _SHARE)

    def _module(self, module: Any, known: Known, storages: Dict[int, Tuple[str, int]], gradients: bool) -> None:
        fields = object.__getattribute__(module, "__dict__")
        own: Optional[str] = None
        parameter = PARAMETER_COPY if known.key in self._copies else PARAMETER
        buffer = KV_CACHE if type(module).__name__ in CACHE_MODULES else BUFFER
        for kind, role in (("_parameters", parameter), ("_buffers", buffer)):
            tensors = fields.get(kind)
            if not isinstance(tensors, dict) or not tensors:
                continue
            if own is None:
                own = self.modules.path(known)
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                if id(tensor) in self.paths:  # of tied ones the first
                    if self._sizes is not None:
                        self._sizes.tied(tensor)
                    continue
                path = "%s/%s" % (own, name)
                self.paths[id(tensor)] = path
                self._take(storages, tensor, path, role)
                if kind == "_parameters" and self._sizes is not None:
                    self._sizes.add(path, tensor, module)
                if gradients and role == PARAMETER:
                    self._gradient(storages, tensor, path)

    def _find_copies(self, optimizers: List[Any], gradients: bool) -> Set[int]:
        try:
            return _copies.find(self.modules, optimizers, self.done, gradients)
        except Exception:  # a parameter without a shape so far, or a program's own kind of module
            return set()

    def _take_caches(self, storages: Dict[int, Tuple[str, int]]) -> Dict[int, int]:
        """Collects caches first, because a cache may be a module with buffers. They keep their allocation's name."""
        cached = {}
        for tensor in self.caches.tensors():
            for address in addresses(tensor):
                storages[address] = ("", KV_CACHE)
                cached[address] = id(tensor)
        return cached

    def _gradient(self, storages: Dict[int, Tuple[str, int]], parameter: Any, path: str) -> None:
        try:
            # PyTorch warns when other tensors' gradients are read.
            gradient = parameter.grad if parameter.requires_grad and parameter.is_leaf else None
        except Exception:
            return
        if gradient is not None:
            self._take(storages, gradient, path, GRADIENT)

    def _optimizer(self, optimizer: Any, storages: Dict[int, Tuple[str, int]], gradients: bool) -> None:
        kind = type(optimizer).__name__
        for group in list(optimizer.param_groups):
            for parameter in list(group["params"]):
                if id(parameter) not in self.paths:  # of no module
                    self.paths[id(parameter)] = kind
                    self._take(storages, parameter, kind, PARAMETER)
                    if gradients:
                        self._gradient(storages, parameter, kind)
        for parameter, state in list(optimizer.state.items()):
            path = self.paths.get(id(parameter), kind)
            self._state(storages, state, path, 0)

    def _state(self, storages: Dict[int, Tuple[str, int]], state: Any, path: str, depth: int) -> None:
        values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
        torch = sys.modules["torch"]
        for value in list(values):
            if isinstance(value, torch.Tensor):
                self._take(storages, value, path, OPTIMIZER_STATE)
                if self._sizes is not None:
                    self._sizes.add_state(value)
            elif depth < _DEEPEST:
                self._state(storages, value, path, depth + 1)

    @staticmethod
    def _take(storages: Dict[int, Tuple[str, int]], tensor: Any, path: str, role: int) -> None:
        for address in addresses(tensor):
            before = storages.get(address)
            if before is None:
                storages[address] = (path, role)
            elif before[1] == role and before[0] != path:
                # Several tensors in one storage, such as the gradients in a bucket of DistributedDataParallel.
                storages[address] = (_common(before[0], path), role)
