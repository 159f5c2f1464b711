"""The highest that was live inside a range of the program."""

import threading
from types import TracebackType
from typing import Any, Dict, List, Optional, Type

from ._library import library
from ._snapshot import HIGH, read

_lock = threading.Lock()
#: Ranges that are open, in any thread.
_open: List["peak"] = []


class peak:
    """``with gpumem.peak() as p: ...``; then ``p.bytes``, ``p.composition``.

    The agent counts while at least one range is open, and not otherwise; ranges may nest and overlap, in any threads. They are
    of the process: what other threads allocate inside the range counts.

    Exact to the byte, unless another thread allocates in the microseconds in which the first range is opened: that may
    count twice or not at all. Of a driver pool counts what it has handed out, not what it has reserved. ``device``: only
    this CUDA ordinal; else the sum of every device's own high, which need not have come at one time. Ordinals from 16 on are not counted.

    ====================== ================================================================================
    ``bytes``              highest sum of live driver allocations; ``None`` without an agent
    ``block_bytes``        highest sum of live blocks of pools; ``None`` likewise
    ``start_bytes``        driver allocations when it began; ``start_block_bytes`` blocks
    ``composition``        bytes by tag at the high: of blocks where there were any, else of driver allocations.
                           It adds up to ``block_bytes`` or ``bytes``; what has no tag is ``""``
    ``devices``            the same per device: ``ordinal``, ``bytes``, ``block_bytes``, ``allocations`` and ``blocks`` by tag
    ====================== ================================================================================
    """

    def __init__(self, device: Optional[int] = None) -> None:
        self._device = device
        self._devices: Dict[int, Dict[str, Any]] = {}
        self.start_bytes: Optional[int] = None
        self.start_block_bytes: Optional[int] = None

    def __enter__(self) -> "peak":
        with _lock:
            self._devices = {}
            found = library()
            if found is not None and found.available():
                if _open:
                    _fold()
                    found.peak(2)
                elif not found.peak(1):
                    return self
                _open.append(self)
                _fold()
                self.start_bytes = self._sum("bytes")
                self.start_block_bytes = self._sum("block_bytes")
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the range; the figures stay."""
        with _lock:
            if self not in _open:
                return
            _fold()
            _open.remove(self)
            found = library()
            if found is not None and not _open:
                found.peak(0)

    def _sum(self, key: str) -> Optional[int]:
        if not self._devices and self not in _open and self.start_bytes is None:
            return None
        return sum(int(device[key]) for device in self._devices.values())

    @property
    def bytes(self) -> Optional[int]:
        """Highest sum of live driver allocations so far."""
        self._look()
        return self._sum("bytes")

    @property
    def block_bytes(self) -> Optional[int]:
        """Highest sum of live blocks so far."""
        self._look()
        return self._sum("block_bytes")

    @property
    def devices(self) -> List[Dict[str, Any]]:
        """The figures per device."""
        self._look()
        return [self._devices[ordinal] for ordinal in sorted(self._devices)]

    @property
    def composition(self) -> Dict[str, int]:
        """Bytes by tag at the high, the largest first."""
        total: Dict[str, int] = {}
        for device in self.devices:
            for path, amount in device["blocks" if device["block_bytes"] else "allocations"].items():
                total[path] = total.get(path, 0) + amount
        return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

    def _look(self) -> None:
        with _lock:
            if self in _open:
                _fold()

    def _take(self, device: Dict[str, Any]) -> None:
        ordinal = device["ordinal"]
        if self._device not in (None, ordinal):
            return
        mine = self._devices.setdefault(
            ordinal, {"ordinal": ordinal, "bytes": -1, "block_bytes": -1, "allocations": {}, "blocks": {}}
        )
        for key, family in (("bytes", "allocations"), ("block_bytes", "blocks")):
            if device[family]["high_bytes"] > mine[key]:
                mine[key] = device[family]["high_bytes"]
                mine[family] = {tag["path"]: tag["bytes"] for tag in device[family]["tags"]}


def _fold() -> None:
    """The high since the last reset belongs to every range that is open."""
    high = read(HIGH)
    for device in (high or {"devices": []})["devices"]:
        for each in _open:
            each._take(device)
