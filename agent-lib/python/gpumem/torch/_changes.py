"""What makes a comparison of modules due, and how much time comparisons may take."""

import sys
import time
from types import FunctionType
from typing import Any, Callable, Iterator, List

#: Share of time for searches, and the same share for comparing and arranging modules.
SHARE = 0.002
#: Maximum seconds of an allowance.
_AT_ONCE = 2.0

#: Methods that change a container's modules without calling a hook of PyTorch. Other methods call these.
_METHODS = (
    ("ModuleList", ("insert", "__delitem__")),
    ("Sequential", ("insert", "__delitem__")),
    ("ModuleDict", ("__delitem__", "clear")),
)


class Allowance:
    """Seconds for work that is not due yet but must not wait: full at the start, then refilled with `SHARE` of the time.

    Limited, because a program may change its modules, or create an optimizer, in each step.
    """

    __slots__ = ("_left", "_counted_at")

    def __init__(self) -> None:
        self._left = _AT_ONCE
        self._counted_at = time.perf_counter()

    def is_left(self) -> bool:
        """Returns whether work may start now."""
        now = time.perf_counter()
        self._left = min(self._left + (now - self._counted_at) * SHARE, _AT_ONCE)
        self._counted_at = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """Subtracts the duration of such work."""
        self._left -= seconds


class _Announced:
    """A method that reports its calls. The class attribute is still the function, and tracebacks contain no frame of this."""

    __slots__ = ("function", "report")

    def __init__(self, function: FunctionType, report: Callable[[], None]) -> None:
        self.function, self.report = function, report

    def __get__(self, container: Any, kind: Any = None) -> Any:
        if container is not None:
            self.report()
        return self.function.__get__(container, kind)


class _Handle:
    """Restores a method; like the handles of PyTorch's hooks."""

    def __init__(self, kind: type, name: str, announced: _Announced) -> None:
        self.kind, self.name, self.announced = kind, name, announced

    def remove(self) -> None:
        if vars(self.kind).get(self.name) is self.announced:
            setattr(self.kind, self.name, self.announced.function)


def _methods() -> Iterator[Any]:
    containers = sys.modules.get("torch.nn.modules.container")
    for container, names in _METHODS:
        kind = getattr(containers, container, None)
        for name in names if isinstance(kind, type) else ():
            yield kind, name, vars(kind).get(name)


def announce(report: Callable[[], None]) -> List[_Handle]:
    """Calls `report` before each change of a container that no hook reports. Calls of other methods cost nothing."""
    handles = []
    for kind, name, function in _methods():
        if isinstance(function, FunctionType):  # otherwise another tool has replaced it
            announced = _Announced(function, report)
            setattr(kind, name, announced)
            handles.append(_Handle(kind, name, announced))
    return handles
