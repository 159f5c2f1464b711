"""The agent's functions used by this package. They are called with the GIL held, because none of them blocks.

``functions`` has one attribute for each. Before ``connect``, and if the agent lacks a function, it does nothing and returns
0.
"""

import ctypes
from typing import Any, Callable, Dict, Optional, Tuple

_number = ctypes.c_uint64
_numbers = ctypes.POINTER(_number)
_Types = Tuple[Optional[type], Tuple[Any, ...]]

#: Result type, argument types.
_FUNCTIONS: Dict[str, _Types] = {
    "available": (ctypes.c_int, ()),
    "module": (None, (_number, _number, _number, ctypes.c_char_p)),
    "module_gone": (None, (_number,)),
    "code": (None, (_number, ctypes.c_int)),
    "rename": (_number, (ctypes.c_char_p, _number)),
    "modules_unknown": (_number, ()),
    "modules_settle": (None, ()),
    "parameters_named": (None, ()),
    "retag": (None, (_number, _number, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)),
    "phase": (None, (ctypes.c_int,)),
    "auto_step": (None, (_number,)),
    "step_number": (_number, ()),
    "autograd_number": (_number, ()),
    "autograd_calibrate": (ctypes.c_int, (ctypes.POINTER(_number), ctypes.c_uint32, _number)),
    "autograd_gradients": (ctypes.c_int, (ctypes.POINTER(_number), ctypes.c_uint32)),
    "adoption_begins": (ctypes.c_int, ()),
    "adopt": (ctypes.c_int, (ctypes.POINTER(_number), _number)),
    "models": (None, (ctypes.c_char_p,)),
    "roles": (None, (ctypes.c_int, ctypes.c_char_p)),
    "keepers_wanted": (ctypes.c_int, ()),
    "keepers": (None, (ctypes.c_char_p,)),
    "locals": (ctypes.c_int, (_numbers, _numbers, _number, _numbers, _number)),
}

#: Same numbers as in gpumem.h.
PARAMETER, GRADIENT, OPTIMIZER_STATE, BUFFER, KV_CACHE, PARAMETER_COPY = 1, 2, 3, 8, 9, 10
FORWARD, OPTIMIZER = 2, 4
#: State of a naming layer: numbers of the wire format.
ACTIVE, DEGRADED, ABSENT, OFF, FAILED = 1, 2, 3, 4, 5


def _nothing(*_: object) -> int:
    return 0


class Functions:
    """Table of the agent's functions as attributes; see the module docstring."""

    def __init__(self) -> None:
        for name in _FUNCTIONS:
            setattr(self, name, _nothing)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # __init__ sets every attribute; this method is for type checkers.
        raise AttributeError(name)


functions = Functions()


class Exports:
    """Functions under their exported names, for code that sets their types itself."""

    gpumem_frames_selftest: Any = staticmethod(_nothing)


exports = Exports()


def connect(address_of: Callable[[str], int]) -> bool:
    """Loads the functions from their addresses. Returns whether the agent is recording."""
    for name, (result, arguments) in _FUNCTIONS.items():
        address = address_of(name)
        if address:
            setattr(functions, name, ctypes.PYFUNCTYPE(result, *arguments)(address))
    test = address_of("frames_selftest")
    if test:
        exports.gpumem_frames_selftest = ctypes.PYFUNCTYPE(ctypes.c_int)(test)
    return bool(functions.available() != 0)


def exported(library: ctypes.CDLL) -> Callable[[str], int]:
    """Returns a lookup of the addresses that a libgpumem.so exports; 0 for a missing name."""

    def address_of(name: str) -> int:
        try:
            return ctypes.cast(library["gpumem_" + name], ctypes.c_void_p).value or 0
        except AttributeError:
            return 0

    return address_of


def text(words: str) -> bytes:
    """Encodes a string for the agent as UTF-8, with NUL replaced by "?"."""
    return words.encode("utf-8", "replace").replace(b"\0", b"?")
