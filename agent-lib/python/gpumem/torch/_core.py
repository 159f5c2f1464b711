"""Connects all parts. Started by the agent from inside the process, or by ``watch``; one instance for each process.

Never raises and never prints: an error becomes the state of the naming layer, with its reason.
"""

import ctypes
import os
import sys
import time
from itertools import chain
from typing import Any, Callable, List, Optional

from . import _adopt, _changes, _codes, _frames
from ._agent import ACTIVE, DEGRADED, connect, exports, functions, text
from ._modules import Modules, next_record
from ._objects import instances
from ._observer import Keepers
from ._steps import Steps, hooks
from ._sweep import Sweeper

#: Results of ``start`` and ``tick``, which set when the agent calls again: at the next allocation; soon; never; in 0.2
#: s; as soon as the program pauses after an allocation.
DONE, LATER, FAILED, AGAIN, WHEN_QUIET = 0, 1, 2, 3, 4

#: Age in seconds after which a sweep looks for tensors that have moved.
_AGE = 2.0
#: For programs that train nothing: seconds of the process's lifetime spent on complete scans without delay, then the
#: share of time.
_IDLE_AT_ONCE, _IDLE_SHARE = 2.0, 0.05
#: Number of nodes used to locate autograd's sequence numbers.
_NODES = 4
#: Number of leaves used to locate gradients.
_LEAVES = 3
#: Failed ticks after which ticks stop.
_FAILURES = 3


class Core:
    """State of the package in this process."""

    def __init__(self) -> None:
        #: Pid that started it: a forked child has its own agent, or none.
        self.process = os.getpid()
        self.modules = Modules()
        self.sweeper = Sweeper(self.modules)
        self.steps = Steps(self.modules, self.sweeper)
        self.handles: List[Any] = []
        #: Hooks that this PyTorch release lacks.
        self.missing: List[str] = []
        #: Whether frame reading and node naming work; ``None`` before the test.
        self.tested: Optional[bool] = None
        self.calibrated: Optional[bool] = None
        self.keepers = Keepers()
        #: Remaining attempts to report blocks allocated before the agent was loaded.
        self.adoptions = _adopt.TRIES
        #: Calls of unknown modules at the last scan.
        self.unknown = 0
        #: Number of failed ticks; whether the last one failed.
        self.failures = 0
        self.is_failing = False
        #: Record number at the end of the last scan; whether allocations were made since the last complete scan; time
        #: of the next one.
        self.head = 0
        self.is_dirty = True
        self.idle_due = 0.0
        self.idle_left = _IDLE_AT_ONCE
        #: Complete scans so far.
        self.looks = 0
        #: Whether a scan is running.
        self.is_looking = False

    def let_go(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()


_core: Optional[Core] = None


def core() -> Optional[Core]:
    """Returns the state of this process, or ``None`` before ``start``."""
    return _core


def _is_ready(torch: Any) -> bool:
    """Returns whether the import of PyTorch is complete."""
    spec = getattr(torch, "__spec__", None)
    if getattr(spec, "_initializing", False):
        return False
    return all(hasattr(torch, name) for name in ("nn", "optim", "autograd", "Tensor", "_C"))


def _is_quiet(torch: Any) -> bool:
    """Returns whether no mode of the program would see, record or change computations made now."""
    c = torch._C
    stacks = ["_len_torch_dispatch_stack"]
    if not hasattr(c, "DisableTorchFunctionSubclass"):
        # Before PyTorch 2.0 DisableTorchFunction did not disable modes. Since then set_default_device is a mode that
        # stays active for the whole program: see _calibrate.
        stacks.append("_len_torch_function_stack")
    for name in stacks:
        count = getattr(c, name, None)
        if count is not None and count() != 0:
            return False
    tracing = getattr(c, "_get_tracing_state", None)
    if tracing is not None and tracing() is not None:
        return False
    if _is_transformed(c):
        return False
    guard = getattr(getattr(torch, "_guards", None), "TracingContext", None)
    get = getattr(guard, "try_get", None)
    return get is None or get() is None


def _is_transformed(c: Any) -> bool:
    """Returns whether a functorch transform (vmap, grad) is active on this thread.

    This reads dispatch keys. Asking functorch for its level would create a thread-local state, which every later backward
    node copies: 2 % of a step.
    """
    keys = [getattr(getattr(c, "DispatchKey", None), name, None) for name in _TRANSFORMED]
    included = getattr(c, "_dispatch_tls_is_dispatch_key_included", None)
    if included is not None and None not in keys:
        return any(included(key) for key in keys)
    functorch = getattr(c, "_functorch", None)
    level = getattr(functorch, "maybe_current_level", None) or getattr(functorch, "peek_interpreter_stack", None)
    return level is not None and level() is not None


_TRANSFORMED = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode")


def _calibrate(torch: Any) -> bool:
    """Creates autograd nodes with known sequence numbers, from which the agent learns their layout. Runs no graph."""
    first = functions.autograd_number()
    nodes: List[Any] = []
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        value = torch.zeros(1, device="cpu", dtype=torch.float32, requires_grad=True)
        first = functions.autograd_number()
        for _ in range(_NODES - 1):
            value = value * 1.0
            nodes.append(value.grad_fn)
        nodes.append(value.add_(1.0).grad_fn)
        last = functions.autograd_number()
    nodes.append(nodes[0].next_functions[0][0])
    if last != first + _NODES:
        return False
    objects = (ctypes.c_uint64 * len(nodes))(*[id(node) for node in nodes])
    return bool(functions.autograd_calibrate(objects, len(nodes), first))


def _show_gradients(torch: Any) -> bool:
    """Creates leaves with gradients, from which the agent learns where gradients are stored. Runs no graph."""
    kept: List[Any] = []
    examples: List[int] = []
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        for _ in range(_LEAVES):
            leaf = torch.zeros(1, device="cpu", dtype=torch.float32, requires_grad=True)
            leaf.grad = torch.zeros(1, device="cpu", dtype=torch.float32)
            node = (leaf * 1.0).grad_fn.next_functions[0][0]
            gradient = leaf.grad
            kept += (leaf, node, gradient)
            examples += (id(node), id(leaf), id(gradient), gradient.data_ptr())
    return bool(functions.autograd_gradients((ctypes.c_uint64 * len(examples))(*examples), _LEAVES))


def _register(torch: Any, core: Core) -> None:
    """Registers PyTorch's hooks, and lists those that this release lacks."""
    module = sys.modules.get("torch.nn.modules.module")
    optimizer = sys.modules.get("torch.optim.optimizer")
    before, after = hooks(core.steps)
    wanted = (
        (module, "register_module_module_registration_hook", core.modules.on_module, "parts of modules"),
        (module, "register_module_parameter_registration_hook", core.modules.on_parameter, "parameters"),
        (optimizer, "register_optimizer_step_pre_hook", before, "optimizers' steps"),
        (optimizer, "register_optimizer_step_post_hook", after, "optimizers' steps"),
    )
    for where, name, hook, what in wanted:
        register = getattr(where, name, None)
        if register is not None:
            core.handles.append(register(hook))
        elif what not in core.missing:
            core.missing.append(what)
    core.handles += _changes.announce(core.modules.expect_moves)


def _say(core: Core) -> None:
    if core.missing:
        reason = "this PyTorch has no hooks for " + ", ".join(core.missing)
        functions.roles(DEGRADED, text(reason))
    else:
        functions.roles(ACTIVE, b"")


def start(address_of: Callable[[str], int]) -> int:
    """Starts once. Returns ``DONE`` or ``WHEN_QUIET``, ``LATER`` if PyTorch is not ready yet, or ``FAILED``."""
    global _core
    try:
        torch = sys.modules.get("torch")
        if torch is None or not _is_ready(torch):
            return LATER
        if _core is not None and _core.process != os.getpid():
            _core.let_go()
            _core = None  # of the parent: its agent was another one
        if _core is not None:
            return tick()
        if not connect(address_of):
            return FAILED
        _codes.hide()
        begun = Core()
        try:
            if not _codes.register():
                begun.missing.append("modules' calls")
            _register(torch, begun)
            begun.modules.search()
        except BaseException:  # the program's own interrupt, too
            begun.let_go()
            raise
        _core = begun
        _say(begun)
        begun.keepers.attach(torch)
        return _finish(torch, begun) or (DONE if _trains(begun) else WHEN_QUIET)
    except Exception as error:
        functions.roles(DEGRADED, text("%s: %s" % (type(error).__name__, error)))
        return FAILED


def _finish(torch: Any, core: Core) -> int:
    """Runs the steps that need a moment without active modes."""
    if core.tested is None:
        core.tested = _frames.prove(exports) == ""
    if core.calibrated is None and functions.autograd_number() != _NONE:
        if not _is_quiet(torch):
            return LATER
        # Retried once, because other code may create nodes at the same time. The agent reports the reason of a failure.
        core.calibrated = _calibrate(torch) or _calibrate(torch)
        if core.calibrated:
            _show_gradients(torch)
    if core.adoptions > 0:
        is_adopted = _adopt.adopt(torch)
        core.adoptions = core.adoptions - 1 if is_adopted is False else 0
        if is_adopted:
            core.sweeper.sweep(core.steps.optimizers(), True)
    return DONE


_NONE = (1 << 64) - 1
_UNHOOKED = "optimizers' steps once its compiler was used"


def tick() -> int:
    """Scans after allocations; the agent calls it on the main thread at intervals."""
    here = _core
    if here is None or here.is_looking:
        return LATER
    here.is_looking = True
    try:
        return _look(here)
    except Exception as error:
        return _failed(error)
    finally:
        here.is_looking = False


def idle() -> int:
    """Scans completely when allocations have paused; the agent calls it on its own thread while the main thread is idle.

    Does nothing in a training, where optimizer steps show every change.
    """
    here = _core
    if here is None or here.is_looking or here.process != os.getpid() or not getattr(sys, "_is_gil_enabled", _yes)():
        return LATER
    here.is_looking = True
    try:
        here.keepers.attach(sys.modules["torch"])
        here.is_dirty = here.is_dirty or next_record() != here.head
        if here.is_dirty and not _trains(here):
            if time.perf_counter() < here.idle_due:
                return LATER
            _look_completely(here)
        return DONE
    except Exception as error:
        return _failed(error)
    finally:
        here.is_looking = False


def _yes() -> bool:
    return True


def _trains(here: Core) -> bool:
    """Returns whether the program has created an optimizer, so that its steps or regular scans show changes."""
    return bool(here.steps.optimizers()) or _codes.count_hooked() > 0


def _look_completely(here: Core) -> None:
    """Finds and reports everything, including work that regular scans postponed."""
    start = time.perf_counter()
    _codes.register_others()
    here.unknown = functions.modules_unknown()
    searches: Any = (here.modules, here.steps, here.sweeper.caches)
    kinds = [search.kinds() for search in searches]
    objects = instances(list(chain.from_iterable(kinds)))
    for search, own in zip(searches, kinds):
        wanted = set(map(id, own))
        search.search([one for one in objects if id(type(one)) in wanted])
    here.sweeper.sweep(here.steps.optimizers(), False)
    here.head, here.is_dirty = next_record(), False
    here.looks += 1
    now = time.perf_counter()
    if here.idle_left > 0:
        here.idle_left -= now - start
    else:
        here.idle_due = now + (now - start) / _IDLE_SHARE


def _look_when_quiet(here: Core) -> int:
    """Scans everything once a program that trains nothing pauses, since it has no optimizer steps that show changes."""
    head = next_record()
    is_quiet, here.head = head == here.head, head
    if _trains(here):
        here.is_dirty = False
        return DONE
    here.is_dirty = here.is_dirty or not is_quiet
    if here.is_dirty and is_quiet and time.perf_counter() >= here.idle_due and _is_quiet(sys.modules["torch"]):
        _look_completely(here)
    return AGAIN if here.is_dirty else WHEN_QUIET


def _look(here: Core) -> int:
    torch = sys.modules["torch"]
    answer = _finish(torch, here)
    here.keepers.attach(torch)
    _codes.register_others()
    if _UNHOOKED not in here.missing and _codes.is_unhooked():
        here.missing.append(_UNHOOKED)
        _say(here)
    modules, sweeper = here.modules, here.sweeper
    unknown = functions.modules_unknown()
    if unknown != here.unknown and modules.is_due():
        here.unknown = unknown
        modules.search()
        here.steps.search()
    here.steps.scan_between_statements()
    quiet = _look_when_quiet(here)
    if sweeper.caches.is_due():
        sweeper.caches.search()
    if sweeper.is_due() and sweeper.age() > _AGE:
        sweeper.sweep(here.steps.optimizers(), False)
    here.head = next_record()
    if here.is_failing:
        here.is_failing = False
        _say(here)
    # A search that was not due yet runs later without further allocations.
    return answer or (AGAIN if functions.modules_unknown() != here.unknown else quiet)


def _failed(error: Exception) -> int:
    """Reports an error. Allows a few retries, because other threads may change modules during a scan."""
    functions.roles(DEGRADED, text("%s: %s" % (type(error).__name__, error)))
    if _core is None or _core.failures >= _FAILURES:
        return FAILED
    _core.failures += 1
    _core.is_failing = True
    return DONE


def watch(model: Any, optimizers: Any, name: Optional[str], every: Optional[int] = None) -> None:
    """See ``gpumem.torch.watch``."""
    here = _core
    if here is None:
        return
    here.modules.want(model)
    here.modules.learn(model)
    if name is not None:
        here.modules.root(model, name)
    if every is not None:
        here.steps.every = max(int(every), 0)
    for optimizer in optimizers:
        here.steps.add(optimizer)
    here.sweeper.sweep(here.steps.optimizers(), True)


def unwatch(model: Any) -> None:
    """See ``gpumem.torch.unwatch``."""
    here = _core
    if here is not None:
        here.modules.forget(model)
