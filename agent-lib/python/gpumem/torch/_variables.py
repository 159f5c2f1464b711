"""Names of the program's variables by the address of the object that they hold, without running code of the program.

`frame.f_locals` would copy local variables into a dict that outlives the call, so that a later `del` of the program would
free nothing. The agent reads the frames instead, as it does for the names of modules.
"""

import ctypes
import sys
from types import CodeType, FrameType, ModuleType
from typing import Dict, List, NamedTuple, Optional, Set

from ._agent import functions

#: Maximum number of frames of a thread, and of threads.
_MOST_FRAMES, _MOST_THREADS = 128, 64


class Name(NamedTuple):
    """A place in the program that keeps an object."""

    #: `global`, `attribute`, `local`, `closure`, `default`, `cache`; `cycle`: objects that refer to each other, and no other to them.
    kind: str
    name: str
    #: The function of a local variable, closure, default or cache.
    function: str
    #: A file, perhaps with a line.
    place: str


def file_of(path: object) -> str:
    """Returns the name of a file without its folder."""
    return path.rpartition("/")[2] if type(path) is str else ""


def function_of(code: CodeType) -> str:
    """Returns the name of a function, with its class since Python 3.11."""
    return str(getattr(code, "co_qualname", code.co_name))


def place_of(code: CodeType) -> str:
    """Returns the file and the first line of a function."""
    return "%s:%d" % (file_of(code.co_filename), code.co_firstlineno)


def _slots(code: CodeType) -> List[str]:
    """Returns the names of a function's variables in the order of their places in a frame."""
    names = list(code.co_varnames)
    own = [name for name in code.co_cellvars if sys.version_info < (3, 11) or name not in code.co_varnames]
    return names + own + list(code.co_freevars)


def _folder(path: object) -> str:
    return path.rpartition("/")[0] + "/" if type(path) is str else ""


def _is_program(code: CodeType) -> bool:
    """Returns whether a function is neither PyTorch's nor this package's, and not in generated code."""
    torch = _folder(getattr(sys.modules.get("torch"), "__file__", None)) or "<"
    own = _folder(_slots.__code__.co_filename)
    return not code.co_filename.startswith(("<", torch, own))


def _is_call_of_module(code: CodeType) -> bool:
    return code.co_name in ("_wrapped_call_impl", "_call_impl") and code.co_filename.endswith("nn/modules/module.py")


class Running:
    """The running frames of all threads: local variables, and the frames themselves."""

    def __init__(self) -> None:
        self.names: Dict[int, Name] = {}
        self.frames: Set[int] = set()
        chains = list(map(_chain, sys._current_frames().values()))[:_MOST_THREADS]
        try:
            for chain in chains:
                self._add(chain)
        finally:
            # A list with this function's own frame is a reference cycle, which would keep the variables of all callers.
            for chain in chains:
                chain.clear()

    def _add(self, chain: List[FrameType]) -> None:
        if chain[0] is sys._getframe(1):  # the agent finds this frame, too
            chain.insert(0, sys._getframe())
        self.frames.update(map(id, chain))
        # What a module's call has in its variables ends with the call.
        calls = [depth for depth, frame in enumerate(chain) if _is_call_of_module(frame.f_code)]
        first = max(calls, default=-1) + 1
        codes = [frame.f_code for frame in chain]
        slots = [_slots(code) if at >= first and _is_program(code) else [] for at, code in enumerate(codes)]
        count, total = len(chain), sum(map(len, slots))
        objects = (ctypes.c_uint64 * total)()
        addresses = (ctypes.c_uint64 * count)(*map(id, codes))
        if not functions.locals(addresses, (ctypes.c_uint64 * count)(*map(len, slots)), count, objects, total):
            return
        left = iter(objects)
        for frame, names in zip(chain, slots):
            place = "%s:%d" % (file_of(frame.f_code.co_filename), frame.f_lineno or 0) if names else ""
            for name in names:
                # A variable of a function is better known than its copies in the functions that it calls.
                self.names[next(left)] = Name("local", name, function_of(frame.f_code), place)


def _chain(frame: Optional[FrameType]) -> List[FrameType]:
    """Returns a thread's frames, the innermost first."""
    chain: List[FrameType] = []
    while frame is not None and len(chain) < _MOST_FRAMES:
        chain.append(frame)
        frame = frame.f_back
    return chain


def global_names() -> Dict[int, str]:
    """Returns the file, or else the name, of each Python module by the address of the dict with its variables."""
    found: Dict[int, str] = {}
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and type(name) is str:
            variables = vars(ModuleType)["__dict__"].__get__(module)
            if type(variables) is dict:
                found.setdefault(id(variables), file_of(variables.get("__file__")) or name)
    return found


