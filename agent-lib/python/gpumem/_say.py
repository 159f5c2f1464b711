"""Annotations from the program: steps, phases, marks, counters, and names and roles of memory."""

import contextlib
import ctypes
import threading
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Set, Type

from ._library import library, text
from ._scope import in_compiled_code

#: Same numbers as in gpumem.h.
ROLES: Dict[str, int] = {
    "parameter": 1,
    "gradient": 2,
    "optimizer_state": 3,
    "activation": 4,
    "input": 5,
    "temporary": 6,
    "workspace": 7,
    "buffer": 8,
    "kv_cache": 9,
    "parameter_copy": 10,
}
PHASES: Dict[str, int] = {"setup": 1, "forward": 2, "backward": 3, "optimizer": 4, "evaluation": 5}

_lock = threading.Lock()
_next_step = 1
_epoch = 0
_phase = 0


class Step:
    """A started step; as a context manager it returns the step's number."""

    __slots__ = ("number",)
    #: Number shown in the report.
    number: int

    def __new__(cls, number: int) -> "Step":  # see scope
        self = object.__new__(cls)
        self.number = number
        return self

    def __enter__(self) -> int:
        return self.number

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        return None


def step(number: Optional[int] = None) -> Step:
    """Marks the start of training step ``number``; the default is the last number plus one, from 1.

    A step lasts until the next one starts: call ``gpumem.step()`` at the top of the loop, or use ``with gpumem.step(): ...``
    around its body. Does nothing in code compiled by ``torch.compile``.
    """
    global _next_step
    if in_compiled_code():
        return Step(-1)
    with _lock:
        number = _next_step if number is None else int(number)
        _next_step = number + 1
    found = library()
    if found is not None:
        found.step(max(number, 0))
    return Step(number)


def epoch(number: Optional[int] = None) -> int:
    """Marks the start of epoch ``number`` and returns the number; the default is the last number plus one, from 1.

    Step numbers restart: at 1 for ``gpumem.step()``, at 0 for steps counted by an optimizer. In code compiled by
    ``torch.compile`` it does nothing and returns -1.
    """
    global _next_step, _epoch
    if in_compiled_code():
        return -1
    with _lock:
        _epoch = max(_epoch + 1 if number is None else int(number), 0)
        _next_step = 1
        begun = _epoch
    found = library()
    if found is not None:
        found.epoch(begun)
    return begun


class Phase:
    """A started phase; as a context manager it restores the previous phase."""

    __slots__ = ("_before",)
    _before: int

    def __new__(cls, before: int) -> "Phase":  # see scope
        self = object.__new__(cls)
        self._before = before
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if self._before >= 0:
            _set_phase(self._before)


def phase(name: str) -> Phase:
    """Marks the start of a phase: ``setup``, ``forward``, ``backward``, ``optimizer`` or ``evaluation``.

    Any other name sets the phase to unknown. ``with gpumem.phase("evaluation"): ...`` restores the previous phase at its end.
    """
    if in_compiled_code():
        return Phase(-1)
    before = _phase
    _set_phase(PHASES.get(name, 0))
    return Phase(before)


def _set_phase(code: int) -> None:
    global _phase
    _phase = code
    found = library()
    if found is not None:
        found.phase(code)


def mark(name: str) -> None:
    """Marks this moment with a name, shown in reports and timelines."""
    if in_compiled_code():
        return
    found = library()
    if found is not None:
        found.mark(text(name))


def counter(name: str, value: int) -> None:
    """Sets the program's counter ``name``, for example a batch size, to an integer."""
    if in_compiled_code():
        return
    found = library()
    if found is not None:
        found.counter_set(text(name), int(value))


def count(name: str, change: int = 1) -> None:
    """Adds ``change``, which may be negative, to the program's counter ``name``. A counter starts at 0."""
    if in_compiled_code():
        return
    found = library()
    if found is not None:
        found.counter_add(text(name), int(change))


def process_tag(path: Optional[str]) -> None:
    """Sets the tag path for threads without an open scope; reports mark it as inherited. ``None`` removes it."""
    found = library()
    if found is not None:
        found.process_tag(text(path or ""))


def retag(what: Any, path: Optional[str] = None, role: Optional[str] = None, phase: Optional[str] = None) -> int:
    """Sets the tag path, role and phase of live memory, and returns the number of addresses it was applied to.

    Roles are ``parameter``, ``gradient``, ``optimizer_state``, ``activation``, ``input``, ``temporary``, ``workspace``,
    ``buffer``, ``kv_cache`` and ``parameter_copy``; phases as in ``phase``. ``None`` leaves a value unchanged.

    ``what`` is a device address, a tensor or array (PyTorch, ``__cuda_array_interface__`` or DLPack), or nested lists,
    tuples, sets and dicts of these. An address must be the first byte of an allocation or block, so views that start
    further inside have no effect. PyTorch views work, because the address of their storage is used.
    """
    if in_compiled_code():
        return 0
    found = library()
    if found is None or not found.available():
        return 0
    name = None if path is None else text(path)
    codes = ROLES.get(role or "", 0), PHASES.get(phase or "", 0)
    applied = set()
    for address in addresses(what):
        if address and address not in applied:
            applied.add(address)
            found.retag(0, address, name, *codes)
    return len(applied)


def addresses(what: Any) -> Iterator[int]:
    """Yields the device addresses of an object. Containers that contain themselves are visited once."""
    left: List[Any] = [what]
    opened: Set[int] = set()
    while left:
        one = left.pop()
        if isinstance(one, bool) or one is None or isinstance(one, (str, bytes)):
            continue
        if isinstance(one, int):
            yield one
        elif isinstance(one, (dict, list, tuple, set, frozenset)):
            if id(one) not in opened:
                opened.add(id(one))
                left.extend(reversed(list(one.values() if isinstance(one, dict) else one)))
        else:
            address = _address(one)
            if address:
                yield address


def _address(what: Any) -> int:
    # Tensors without memory (fake, meta) and other objects that claim to be arrays may raise any exception.
    with contextlib.suppress(Exception):
        if hasattr(what, "_local_tensor"):  # DTensor
            what = what._local_tensor
        if hasattr(what, "untyped_storage"):
            return int(what.untyped_storage().data_ptr()) if what.is_cuda else 0
        memory: Any = getattr(getattr(what, "data", None), "mem", None)
        if memory is not None and hasattr(memory, "ptr"):  # CuPy: the allocation below a view
            return int(memory.ptr)
        if hasattr(what, "__cuda_array_interface__"):
            return int(what.__cuda_array_interface__["data"][0])
        if hasattr(what, "unsafe_buffer_pointer"):  # JAX
            on_gpu = all(device.platform in ("gpu", "cuda") for device in what.devices())
            return int(what.unsafe_buffer_pointer()) if on_gpu else 0
        if hasattr(what, "__dlpack__") and what.__dlpack_device__()[0] in (2, 13):  # CUDA, managed
            return _of_capsule(what.__dlpack__())
    return 0


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("type", ctypes.c_uint32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


def _of_capsule(capsule: Any) -> int:
    """Returns the base address in a DLPack capsule without consuming it: the capsule keeps ownership."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = [ctypes.py_object, ctypes.c_char_p]
    place = get(capsule, b"dltensor")
    return int(_DLTensor.from_address(place).data) if place else 0
