"""Observes failed requests of PyTorch, and reports the variables that keep CUDA tensors then.

PyTorch calls its observers after a request has failed, with the GIL, before it raises the error. The first failures of a process
are followed by a search.
"""

import gc
import os
import sys
import time
from typing import Any, List, Optional, Tuple

from ._agent import functions, text
from ._keepers import Held, find
from ._objects import SECONDS, Deadline, attributes, classes, count_objects, count_references, instances, referenced
from ._variables import Running

#: Failed requests of a process after which objects are scanned.
SCANS = 3
#: Maximum interval at which the program lets threads change, in seconds; see `_Alone`.
_SLOWEST_SWITCH = 0.05
#: Maximum number of tracked objects, and of references from lists, tuples, dicts and sets.
_MOST_OBJECTS, _MOST_REFERENCES = 2_000_000, 10_000_000
#: Packages whose errors are those of the scan; the last one is this package inside of the agent's library.
_OWN = ("gpumem", "torch", "_gpumem_torch")
#: Numbers of tools of `sys.monitoring` that see each call: debuggers, coverage, profilers.
_SEEING_TOOLS = range(3)


def _tensors(torch: Any, deadline: Deadline) -> List[Tuple[Any, Held]]:
    """Returns the tensors on GPUs that Python objects refer to, except those of models, gradients and optimizers.

    Returns none if the time is over.
    """
    # Most tensors of a graph are kept by the graph alone, and end with it on any thread.
    plain_addresses = set(map(id, instances([torch.Tensor])))
    kept = referenced(plain_addresses) | (Running().names.keys() & plain_addresses)
    if deadline.is_over():
        return []
    modules, optimizers = classes(torch.nn.Module), classes(torch.optim.Optimizer)
    objects = instances([torch.Tensor, torch.nn.Parameter, *modules, *optimizers])
    of_modules, of_optimizers = set(map(id, modules)), set(map(id, optimizers))
    known: List[Any] = []
    plain: List[Any] = []
    with torch._C.DisableTorchFunction():
        for thing in objects:
            kind = type(thing)
            if kind is torch.Tensor:
                if id(thing) in kept:
                    plain.append(thing)
            elif kind is torch.nn.Parameter:
                known += [thing, thing._grad] if thing.is_leaf else [thing]
            elif id(kind) in of_modules:
                known += _values(_values([attributes(thing)], "_buffers"))
            elif id(kind) in of_optimizers:
                known += _values(_values(_values([attributes(thing)], "state")))
        excluded = {held.storage for held in map(_held, known) if held is not None}
        found = [(tensor, _held(tensor)) for tensor in plain]
    return [(tensor, held) for tensor, held in found if held is not None and held.storage not in excluded]


def _values(groups: List[Any], key: Any = None) -> List[Any]:
    """Returns the values in dicts, or those of one key."""
    found: List[Any] = []
    for group in groups:
        if issubclass(type(group), dict):
            found += dict.values(group) if key is None else [dict.get(group, key)]
    return found


def _held(tensor: Any) -> Optional[Held]:
    """Describes a tensor on a GPU; `None` for anything else, and without a storage."""
    if type(tensor) not in _tensor_kinds():
        return None
    try:
        if not tensor.is_cuda:
            return None
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if type(size) is not int:  # of a compiler: it would note each comparison
            return None
        return Held(storage._cdata, size, tensor.requires_grad and not tensor.is_leaf)
    except Exception:  # of a transform, or of a compiler
        return None


def _tensor_kinds() -> Tuple[type, ...]:
    torch = sys.modules["torch"]
    return torch.Tensor, torch.nn.Parameter


def _may_scan() -> bool:
    """Returns whether a scan disturbs nobody: other threads wait for the GIL, and no function of the program sees each call."""
    has_gil = bool(getattr(sys, "_is_gil_enabled", lambda: True)())
    is_seen = sys.gettrace() is not None or sys.getprofile() is not None
    monitoring = getattr(sys, "monitoring", None)  # since 3.12
    if monitoring is not None:
        is_seen = is_seen or any(monitoring.get_tool(number) is not None for number in _SEEING_TOOLS)
    return has_gil and not is_seen and sys.getswitchinterval() <= _SLOWEST_SWITCH


class _Alone:
    """Keeps other threads and the garbage collector from running during a scan.

    The scan refers to objects of other threads. A tuple under construction with a second reference raises SystemError when its
    constructor resizes it, and objects that other threads drop would end here.
    """

    def __init__(self) -> None:
        self.interval = sys.getswitchinterval()
        self.collects = gc.isenabled()

    def __enter__(self) -> None:
        try:
            sys.setswitchinterval(SECONDS)
            # A thread that waits already asks for the GIL after the old interval. It gets it now, while nothing is held.
            end = time.monotonic() + 2 * self.interval
            while time.monotonic() < end:
                pass
            self.collects = gc.isenabled()
            gc.disable()
        except BaseException:  # of a signal handler
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        if self.collects:
            gc.enable()
        sys.setswitchinterval(self.interval)


def _is_own(error: BaseException) -> bool:
    """Returns whether an error was raised by the scan, and not by a signal handler of the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__") if trace is not None else __name__
    return type(module) is str and module.partition(".")[0] in _OWN


class Keepers:
    """The agent's observer of failed requests."""

    def __init__(self) -> None:
        self.left = SCANS
        self.is_attached = self.is_queued = False
        self.process = os.getpid()

    def attach(self, torch: Any) -> None:
        """Attaches the observer, at the latest when the program has initialised CUDA."""
        # Since 2.0. Observers cannot be removed, and a second one would scan again.
        is_known = hasattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer")
        if self.is_attached or not is_known or not functions.keepers_wanted():
            return
        if torch.cuda.is_initialized():
            self._attach()
        elif not self.is_queued:  # attaching would initialise CUDA
            self.is_queued = True
            # PyTorch calls these at the end of the initialisation, during which this may run. Its function for adding one
            # waits for a lock that the main thread may hold.
            calls = getattr(torch.cuda, "_queued_calls", None)
            if type(calls) is list:
                calls.append((self._attach, []))

    def _attach(self) -> None:
        if self.is_attached or self.process != os.getpid():
            return
        self.is_attached = True
        try:
            sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(self.on_failure)
        except Exception:  # the program's allocator has no observers
            pass

    def on_failure(self, *_: Any) -> None:
        """Scans objects after a failed request, and reports the names that keep tensors."""
        if self.left > 0 and _may_scan():
            self.left -= 1
            try:
                with _Alone():
                    self._scan(sys.modules["torch"])
            except BaseException as error:
                if not isinstance(error, Exception) or not _is_own(error):
                    # Without the frames of the scan, whose variables refer to objects of the program.
                    raise error.with_traceback(None)

    def _scan(self, torch: Any) -> None:
        deadline = Deadline()
        if count_objects() <= _MOST_OBJECTS and count_references() <= _MOST_REFERENCES and not deadline.is_over():
            tensors = _tensors(torch, deadline)
            with torch._C.DisableTorchFunction():
                rows = find(tensors, (torch.Tensor,), deadline)
            if rows:
                functions.keepers(text("\n".join(row.line() for row in rows)))
