"""Tests the agent's reading of Python frames in this process, and encodes the meaning of code objects.

Imports nothing of this package, because it also runs in programs that have not installed it.
"""

from __future__ import annotations

import ctypes
import sys
from types import CodeType, FrameType
from typing import Any, Iterator

MODULE, OPTIMIZER, BACKWARD, SETUP, BOUNDARY, STEP = 1, 2, 3, 4, 5, 6
PARAMETER, GRADIENT = 7, 8
#: Used only when memory runs out.
ZERO_GRAD, CUSTOM_FUNCTION = 9, 10
REDUCTION = 11
KV_CACHE, PARAMETER_COPY, COPYING, CACHE_UPDATE = 12, 13, 14, 15
OPTIMIZER_STATE, CLOSURE, MODULE_HOOK = 16, 17, 18
_IN_CELL = 128


def meaning(code: CodeType, what: int, name: str = "self") -> int:
    """Returns the second argument of `gpumem_code`: the code's meaning, and which local variable holds the module or optimizer."""
    if what not in (MODULE, SETUP, STEP):
        return what
    if name not in code.co_cellvars:
        return what | code.co_varnames.index(name) << 8
    if sys.version_info >= (3, 11):
        slot = code.co_varnames.index(name)
    else:
        slot = code.co_nlocals + code.co_cellvars.index(name)  # the argument's own place is empty
    return what | _IN_CELL | slot << 8


class _Probe:
    """Creates frames of several kinds whose first variable is known."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.test = library.gpumem_frames_selftest
        places = ctypes.c_void_p
        self.test.argtypes = [places, places, places, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
        self.test.restype = ctypes.c_int

    def run(self, depth: int) -> str:
        if depth > 0:
            return self.run(depth - 1)
        return [reason for reason in self.generate()][0]

    def generate(self) -> Iterator[str]:
        yield self.compare()

    def compare(self) -> str:
        frames = list(_chain(sys._getframe()))
        ours = {function.__code__ for function in (_Probe.run, _Probe.generate, _Probe.compare)}
        mine = [frame.f_code in ours for frame in frames]
        count, address = len(frames), id(self)  # no inner function may use `self`: it would lie in a cell
        codes = (ctypes.c_uint64 * count)(*[id(frame.f_code) for frame in frames])
        firsts = (ctypes.c_uint64 * count)(*[address if known else 0 for known in mine])
        # This frame's line changes before the call, so it is not compared.
        numbers = [frame.f_lineno if known else 0 for frame, known in zip(frames, mine)]
        lines = (ctypes.c_int * count)(*[0] + numbers[1:])
        reason = ctypes.create_string_buffer(256)
        del frames
        if self.test(codes, firsts, lines, count, reason, len(reason)):
            return ""
        return reason.value.decode("utf-8", "replace") or "the agent does not record"


def _chain(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def prove(library: Any) -> str:
    """Lets the agent compare the frames it reads with Python's own; returns "" on success, else the reason."""
    return _Probe(library).run(3)
