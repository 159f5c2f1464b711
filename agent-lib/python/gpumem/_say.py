"""What the program says of itself: steps, phases, marks, counters, and what a piece of memory is."""

import contextlib
import ctypes
import threading
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Set, Type

from ._library import library, text
from ._scope import in_compiled_code

#: As in gpumem.h.
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
    """A step that has begun; as a context manager it gives its number."""

    __slots__ = ("number",)
    #: As the report has it.
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
    """Step ``number`` of the training begins; without a number the one after the last, from 1 on.

    In code that ``torch.compile`` compiles it does nothing. It lasts until the next one begins: ``gpumem.step()`` at the top of the loop, or ``with gpumem.step(): ...`` around its body.
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
    """Epoch ``number`` of the training begins; without a number the one after the last, from 1 on. Its number.

    Steps are numbered anew in it: ``gpumem.step()`` from 1 on, those that an optimizer's steps number from 0. In code that
    ``torch.compile`` compiles it does nothing.
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
    """A phase that has begun; as a context manager it puts back the phase that was."""

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
    """The process enters a phase: ``setup``, ``forward``, ``backward``, ``optimizer`` or ``evaluation``; another word is none
    of them. ``with gpumem.phase("evaluation"): ...`` goes back to what it was before."""
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
    """Something worth a mark in time happened."""
    if in_compiled_code():
        return
    found = library()
    if found is not None:
        found.mark(text(name))


def counter(name: str, value: int) -> None:
    """The program's own figure ``name`` has this value from now on; a whole number, such as a batch size."""
    if in_compiled_code():
        return
    found = library()
    if found is not None:
        found.counter_set(text(name), int(value))


def count(name: str, change: int = 1) -> None:
    """The program's own figure ``name`` is so much more; it begins at 0."""
    if in_compiled_code():
        return
    found = library()
    if found is not None:
        found.counter_add(text(name), int(change))


def process_tag(path: Optional[str]) -> None:
    """The tag of what threads without an open scope allocate; the report marks it as inherited. ``None``: none."""
    found = library()
    if found is not None:
        found.process_tag(text(path or ""))


def retag(what: Any, path: Optional[str] = None, role: Optional[str] = None, phase: Optional[str] = None) -> int:
    """Says what is known by now of memory: its path, its role (``parameter``, ``gradient``, ``optimizer_state``,
    ``activation``, ``input``, ``temporary``, ``workspace``, ``buffer``, ``kv_cache``, ``parameter_copy``), its phase. ``None``
    leaves it as it was.

    ``what`` is a device address, a tensor or array (PyTorch, or with ``__cuda_array_interface__`` or DLPack), or any
    nesting of lists, tuples, sets and dicts of those. An address is the first byte of its allocation or block: a view that
    begins further in is not found, but for PyTorch's, whose storage is asked. The number of addresses that were said.
    """
    if in_compiled_code():
        return 0
    found = library()
    if found is None or not found.available():
        return 0
    name = None if path is None else text(path)
    codes = ROLES.get(role or "", 0), PHASES.get(phase or "", 0)
    said = set()
    for address in addresses(what):
        if address and address not in said:
            said.add(address)
            found.retag(0, address, name, *codes)
    return len(said)


def addresses(what: Any) -> Iterator[int]:
    """Where on a device it lies. What holds itself is looked into once."""
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
    # Tensors without memory (fake, meta) raise whatever they like; so may anything that calls itself an array.
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
    """The base address in a DLPack capsule, which keeps its owner: nobody takes the tensor."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = [ctypes.py_object, ctypes.c_char_p]
    place = get(capsule, b"dltensor")
    return int(_DLTensor.from_address(place).data) if place else 0
