"""Peak memory inside a range of the program."""

import threading
from types import TracebackType
from typing import Any, Dict, List, Optional, Type

from ._library import library
from ._snapshot import HIGH, read

_lock = threading.Lock()
#: Open ranges of all threads.
_open: List["peak"] = []


class peak:
    """Tracks the highest memory of this process inside ``with gpumem.peak() as p: ...``.

    Read ``p.bytes`` and ``p.composition`` inside or after the range. Ranges may nest and overlap, also across threads; they
    cover all threads of the process. The agent tracks peaks only while a range is open.

    The figures are exact to the byte. Allocations that another thread makes in the microseconds in which the first range
    opens may be counted twice or not at all. Driver pools count with their allocated bytes, not their
    reserved bytes. ``device`` restricts the range to one CUDA ordinal. Otherwise figures are the sum of each device's peak,
    which may occur at different times. Ordinals from 16 on are not counted.

    ====================== ================================================================================
    ``bytes``              highest sum of live driver allocations in bytes; ``None`` without an agent
    ``block_bytes``        highest sum of live pool blocks in bytes; ``None`` without an agent
    ``start_bytes``        driver allocations at the start of the range; ``start_block_bytes`` for pool blocks
    ``composition``        bytes by tag at the peak: of pool blocks if there were any, else of driver allocations.
                           The sum is ``block_bytes`` or ``bytes``; the key ``""`` holds untagged memory
    ``devices``            the same for each device: ``ordinal``, ``bytes``, ``block_bytes``, ``allocations`` and ``blocks`` by tag
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
        """Ends the range; its figures remain readable."""
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
        """Highest sum of live driver allocations so far, in bytes; ``None`` without an agent."""
        self._look()
        return self._sum("bytes")

    @property
    def block_bytes(self) -> Optional[int]:
        """Highest sum of live pool blocks so far, in bytes; ``None`` without an agent."""
        self._look()
        return self._sum("block_bytes")

    @property
    def devices(self) -> List[Dict[str, Any]]:
        """Figures of each device, by ascending CUDA ordinal."""
        self._look()
        return [self._devices[ordinal] for ordinal in sorted(self._devices)]

    @property
    def composition(self) -> Dict[str, int]:
        """Bytes by tag at the peak, largest first."""
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
    """Merges the peak since the last reset into every open range."""
    high = read(HIGH)
    for device in (high or {"devices": []})["devices"]:
        for each in _open:
            each._take(device)
