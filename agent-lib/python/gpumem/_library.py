"""Access to the agent in this process, libgpumem.so, through ctypes.

The driver loads the library inside cuInit from ``CUDA_INJECTION64_PATH``, which ``gpumemctl run`` sets. If it is not
set, ``attach`` sets it to the wheel's copy, or loads that copy at once if CUDA is already initialised.

Calls release the GIL. The library is never unloaded, so the handle is cached. Until it is found, the lookup is repeated
whenever the environment variable changes. A function that an older library lacks does nothing.
"""

import ctypes
import os
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

#: Library that the driver loads, and the injection library that the agent loads in turn.
PATH = "CUDA_INJECTION64_PATH"
NEXT = "GPUMEM_NEXT_INJECTION64_PATH"
NVTX = "NVTX_INJECTION64_PATH"

_text = ctypes.c_char_p
_u64 = ctypes.c_uint64
_int = ctypes.c_int

#: Exported functions: result type, argument types.
_FUNCTIONS: Dict[str, Tuple[Optional[type], Tuple[type, ...]]] = {
    "available": (_int, ()),
    "pause": (None, ()),
    "resume": (None, ()),
    "process_tag": (None, (_text,)),
    "step": (None, (_u64,)),
    "epoch": (None, (_u64,)),
    "phase": (None, (_int,)),
    "mark": (None, (_text,)),
    "pool_create": (_u64, (_text, _int, _u64)),
    "pool_destroy": (None, (_u64,)),
    "segment_add": (None, (_u64, _u64, _u64)),
    "segment_remove": (None, (_u64, _u64, _u64)),
    "block_alloc": (None, (_u64, _u64, _u64, ctypes.c_uint32)),
    "block_free": (None, (_u64, _u64, _int)),
    "pool_state": (None, (_u64, _u64, _u64)),
    "pool_check": (None, (_u64, _u64)),
    "retag": (None, (_u64, _u64, _text, _int, _int)),
    "scope_word": (ctypes.c_void_p, ()),
    "scope_edge": (None, (_int,)),
    "intern": (ctypes.c_uint32, (ctypes.c_uint32, _text)),
    "snapshot": (_u64, (_int, ctypes.c_void_p, _u64)),
    "peak": (_int, (_int,)),
    "counter_set": (None, (_text, ctypes.c_int64)),
    "counter_add": (None, (_text, ctypes.c_int64)),
    "configure": (_int, (_text, _text)),
    "start": (_int, ()),
    "stop": (_int, ()),
    "mute": (None, ()),
    "unmute": (None, ()),
    "dump": (_int, (_text, _int)),
    "report": (ctypes.c_void_p, (_text, _text)),
}
#: A library without these is not accepted.
_NEEDED = ("available", "pause", "resume")

_lock = threading.Lock()
_found: Optional["Library"] = None
_searched_path: Optional[str] = None
_searched = False
#: Callbacks to run when an agent is found.
when_found: List[Callable[[], None]] = []


class Library:
    """Functions of one libgpumem.so, one attribute for each entry of ``_FUNCTIONS``."""

    available: Callable[[], int]
    pause: Callable[[], None]
    resume: Callable[[], None]
    process_tag: Callable[[bytes], None]
    step: Callable[[int], None]
    epoch: Callable[[int], None]
    phase: Callable[[int], None]
    mark: Callable[[bytes], None]
    pool_create: Callable[[bytes, int, int], int]
    pool_destroy: Callable[[int], None]
    segment_add: Callable[[int, int, int], None]
    segment_remove: Callable[[int, int, int], None]
    block_alloc: Callable[[int, int, int, int], None]
    block_free: Callable[[int, int, int], None]
    pool_state: Callable[[int, int, int], None]
    pool_check: Callable[[int, int], None]
    retag: Callable[[int, int, Optional[bytes], int, int], None]
    scope_word: Callable[[], Optional[int]]
    scope_edge: Callable[[int], None]
    intern: Callable[[int, bytes], int]
    snapshot: Callable[[int, Any, int], int]
    peak: Callable[[int], int]
    counter_set: Callable[[bytes, int], None]
    counter_add: Callable[[bytes, int], None]
    configure: Callable[[bytes, bytes], int]
    start: Callable[[], int]
    stop: Callable[[], int]
    mute: Callable[[], None]
    unmute: Callable[[], None]
    dump: Callable[[bytes, int], int]
    report: Callable[[bytes, bytes], Optional[int]]

    def __init__(self, handle: ctypes.CDLL) -> None:
        #: For functions outside this table.
        self.handle = handle
        #: Functions that this library lacks.
        self.missing: List[str] = []
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function: Any = getattr(handle, "gpumem_" + name)
            except AttributeError:
                if name in _NEEDED:
                    raise
                self.missing.append(name)
                function = _nothing
            else:
                function.restype = result
                function.argtypes = list(arguments)
            setattr(self, name, function)


def _nothing(*_: Any) -> int:
    return 0


def library() -> Optional[Library]:
    """Returns the agent's functions, or ``None`` without an agent."""
    global _found, _searched_path, _searched
    if _found is not None:
        return _found
    path = os.environ.get(PATH)
    if _searched and path == _searched_path:
        return None
    with _lock:
        if _found is None:
            _found = _find(path)
            _searched_path, _searched = path, True
            if _found is not None:
                for callback in when_found:
                    callback()
        return _found


def _find(path: Optional[str]) -> Optional[Library]:
    if path and _is_agent(path):
        # Prefer the loaded copy. Loading it early only makes it callable before CUDA is initialised.
        for mode in (os.RTLD_NOW | os.RTLD_NOLOAD, os.RTLD_NOW):
            found = _open(path, mode)
            if found is not None:
                return found
    return _open(None, os.RTLD_NOW)  # preloaded, or linked


def _is_agent(path: str) -> bool:
    return os.path.basename(path).startswith("libgpumem")


def _open(path: Optional[str], mode: int) -> Optional[Library]:
    try:
        return Library(ctypes.CDLL(path, mode=mode))
    except (OSError, AttributeError):  # missing, or not the agent
        return None


def available() -> bool:
    """Returns whether an agent is loaded in this process and recording."""
    found = library()
    return found is not None and found.available() != 0


def text(name: object) -> bytes:
    """Returns a name as the library expects it: UTF-8 without NUL bytes."""
    return str(name).encode("utf-8", "replace").split(b"\0")[0]


def attach() -> None:
    """Loads the wheel's agent if there is none: with CUDA, or at once if CUDA is initialised. Run by ``import gpumem``."""
    if os.environ.get("GPUMEM_DISABLE", "0") not in ("", "0"):
        return
    before = os.environ.get(PATH)
    if before and _is_agent(before):
        path = before
    else:
        found = own_library()
        if found is None:
            return
        path = found
        if before:
            os.environ[NEXT] = before  # the agent loads this one first
        os.environ[PATH] = path
        os.environ.setdefault(NVTX, path)
    if _is_cuda_initialised():
        _load_agent(path, before)


def own_library() -> Optional[str]:
    """Returns the path of the wheel's library, or ``None`` outside a wheel."""
    named = os.environ.get("GPUMEM_LIBRARY")
    path = named or os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgpumem.so")
    return path if os.path.isfile(path) else None


def _is_cuda_initialised() -> bool:
    """Returns whether cuInit was called. Before that, every other driver call fails with "not initialised"."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        count = ctypes.c_int()
        return int(driver.cuDeviceGetCount(ctypes.byref(count))) == 0
    except (OSError, AttributeError):
        return False


def _load_agent(path: str, before: Optional[str]) -> None:
    """Does what the driver does in cuInit. Has no effect if an agent is already loaded."""
    next_one = os.environ.pop(NEXT, None) if before and not _is_agent(before) else None
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOW).InitializeInjection()
    except (OSError, AttributeError):
        pass
    finally:
        if next_one is not None:
            os.environ[NEXT] = next_one  # already loaded by the driver
