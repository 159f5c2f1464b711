"""The agent in this process: libgpumem.so, through ctypes.

The driver loads it inside of cuInit, from ``CUDA_INJECTION64_PATH``. ``gpumemctl run`` sets that; where it is not set,
``attach`` sets it to the copy of the wheel, or lets that copy in at once if CUDA is initialised already.

A call releases the GIL. The library is never unloaded, so what was found is kept; while nothing was found, it is
looked for again when the environment says something new. A function that the library in the process is too old for does
nothing.
"""

import ctypes
import os
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

#: What the driver loads, and what the agent hands over to.
PATH = "CUDA_INJECTION64_PATH"
NEXT = "GPUMEM_NEXT_INJECTION64_PATH"
NVTX = "NVTX_INJECTION64_PATH"

_text = ctypes.c_char_p
_u64 = ctypes.c_uint64
_int = ctypes.c_int

#: Exported functions: type of the result, types of the arguments.
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
#: The oldest library that counts as one has these.
_NEEDED = ("available", "pause", "resume")

_lock = threading.Lock()
_found: Optional["Library"] = None
_looked_for: Optional[str] = None
_looked = False
#: Told when an agent was found.
when_found: List[Callable[[], None]] = []


class Library:
    """The functions of one libgpumem.so; an attribute each, as ``_FUNCTIONS`` names them."""

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
        #: For functions that are not in this table.
        self.handle = handle
        #: Functions that this library does not have.
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
    """The agent's functions, or ``None`` where there is none."""
    global _found, _looked_for, _looked
    if _found is not None:
        return _found
    path = os.environ.get(PATH)
    if _looked and path == _looked_for:
        return None
    with _lock:
        if _found is None:
            _found = _find(path)
            _looked_for, _looked = path, True
            if _found is not None:
                for tell in when_found:
                    tell()
        return _found


def _find(path: Optional[str]) -> Optional[Library]:
    if path and _is_agent(path):
        # First the copy that is there. Loading it early does nothing but let it be called before CUDA begins.
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
    except (OSError, AttributeError):  # not there, or not ours
        return None


def available() -> bool:
    """Whether an agent is in this process and records."""
    found = library()
    return found is not None and found.available() != 0


def text(name: object) -> bytes:
    """A name as the library takes it: UTF-8 without a 0."""
    return str(name).encode("utf-8", "replace").split(b"\0")[0]


def attach() -> None:
    """Lets the wheel's agent in, where none is: when CUDA begins, or late if it has begun. Called by ``import gpumem``."""
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
            os.environ[NEXT] = before  # loaded by the agent, before itself
        os.environ[PATH] = path
        os.environ.setdefault(NVTX, path)
    if _cuda_has_begun():
        _let_in(path, before)


def own_library() -> Optional[str]:
    """The copy that the wheel brings, if this is a wheel."""
    named = os.environ.get("GPUMEM_LIBRARY")
    path = named or os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgpumem.so")
    return path if os.path.isfile(path) else None


def _cuda_has_begun() -> bool:
    """Whether cuInit was called: before, the driver answers every other call that it is not initialised."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        count = ctypes.c_int()
        return int(driver.cuDeviceGetCount(ctypes.byref(count))) == 0
    except (OSError, AttributeError):
        return False


def _let_in(path: str, before: Optional[str]) -> None:
    """What the driver would have done in cuInit. With an agent there already, this does nothing."""
    next_one = os.environ.pop(NEXT, None) if before and not _is_agent(before) else None
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOW).InitializeInjection()
    except (OSError, AttributeError):
        pass
    finally:
        if next_one is not None:
            os.environ[NEXT] = next_one  # the driver has loaded that one itself
