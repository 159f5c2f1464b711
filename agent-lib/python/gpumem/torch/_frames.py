"""The proof that the agent reads frames rightly: Python's own word of this thread's frames, for it to compare.

Of the program's frames only their code and their lines are told: a look at their variables would keep those alive.
"""

import ctypes
import sys
from typing import Any, List

from ._agent import functions

#: More are not compared.
_MOST = 64


class _Probe:
    """Calls of its methods are the frames whose first variable is known."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def go(self) -> bool:
        """Further in, and then the question."""
        if self.depth > 0:
            inner = _Probe(self.depth - 1)
            return inner.go()
        return self.ask(sys._getframe())

    def ask(self, frame: Any) -> bool:
        """What the frames are; the innermost one, this, is at another line by the time of the call."""
        own = sys._getframe()
        codes: List[int] = [id(own.f_code)]
        firsts: List[int] = [id(self)]
        lines: List[int] = [0]
        while frame is not None and len(codes) < _MOST:
            codes.append(id(frame.f_code))
            mine = frame.f_code is _Probe.go.__code__
            firsts.append(id(frame.f_locals["self"]) if mine else 0)
            lines.append(frame.f_lineno or 0)
            frame = frame.f_back
        count = len(codes)
        reason = ctypes.create_string_buffer(256)
        done = functions.frames_selftest(
            (ctypes.c_uint64 * count)(*codes),
            (ctypes.c_uint64 * count)(*firsts),
            (ctypes.c_int32 * count)(*lines),
            count,
            reason,
            len(reason),
        )
        del own
        return bool(done)


def prove() -> bool:
    """Whether the agent reads frames from now on; it has said why not."""
    return _Probe(3).go()
