"""The agent in this process: libgpumem.so, which the driver loads, through ctypes.

A call releases the GIL. The library is never unloaded, so what was found is kept; while nothing was found, it is
looked for again when the environment says something new.
"""

import ctypes
import os
import threading
from typing import Callable, Dict, Optional, Tuple

#: Set by ``gpumemctl run``: what the driver loads.
_PATH = "CUDA_INJECTION64_PATH"

#: Exported functions: type of the result, types of the arguments.
_FUNCTIONS: Dict[str, Tuple[Optional[type], Tuple[type, ...]]] = {
    "available": (ctypes.c_int, ()),
    "pause": (None, ()),
    "resume": (None, ()),
}

_lock = threading.Lock()
_found: Optional["Library"] = None
_looked_for: Optional[str] = None
_looked = False


class Library:
    """The functions of one libgpumem.so; an attribute each, as ``_FUNCTIONS`` names them."""

    available: Callable[[], int]
    pause: Callable[[], None]
    resume: Callable[[], None]

    def __init__(self, handle: ctypes.CDLL) -> None:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(handle, "gpumem_" + name)
            function.restype = result
            function.argtypes = list(arguments)
            setattr(self, name, function)


def library() -> Optional[Library]:
    """The agent's functions, or ``None`` where there is none."""
    global _found, _looked_for, _looked
    if _found is not None:
        return _found
    path = os.environ.get(_PATH)
    if _looked and path == _looked_for:
        return None
    with _lock:
        if _found is None:
            _found = _find(path)
            _looked_for, _looked = path, True
        return _found


def _find(path: Optional[str]) -> Optional[Library]:
    if path and os.path.basename(path).startswith("libgpumem"):
        # First the copy that is there. Loading it early does nothing but let it be called before CUDA begins.
        for mode in (os.RTLD_NOW | os.RTLD_NOLOAD, os.RTLD_NOW):
            found = _open(path, mode)
            if found is not None:
                return found
    return _open(None, os.RTLD_NOW)  # preloaded, or linked


def _open(path: Optional[str], mode: int) -> Optional[Library]:
    try:
        return Library(ctypes.CDLL(path, mode=mode))
    except (OSError, AttributeError):  # not there, or not ours
        return None


def available() -> bool:
    """Whether an agent is in this process and records."""
    found = library()
    return found is not None and found.available() != 0
