"""Memory for each notebook cell: ``%load_ext gpumem``.

After each cell one line shows current memory, its change, and the peak inside the cell.
"""

import sys
from typing import Any, Dict, List, Optional

from ._library import available
from ._peak import peak
from ._snapshot import snapshot, status


def amount(value: Optional[int]) -> str:
    """Formats bytes as MiB."""
    return "?" if value is None else "{:,.1f} MiB".format(value / (1 << 20))


def change(value: int) -> str:
    """Formats a difference in bytes as MiB with its sign."""
    return "{:+,.1f} MiB".format(value / (1 << 20))


class Cells:
    """Prints one line for each cell."""

    def __init__(self) -> None:
        self.is_on = True
        #: Figures of the last cell: ``live_bytes``, ``change_bytes``, ``peak_bytes``, ``blocks``, ``composition``;
        #: ``None`` before the first cell.
        self.last: Optional[Dict[str, Any]] = None
        self._range: Optional[peak] = None
        self._reported_late = False

    def before(self, *_: Any) -> None:
        """Opens a peak range; called before a cell runs."""
        self.after_silently()
        if self.is_on and available():
            self._range = peak()
            self._range.__enter__()

    def after_silently(self) -> None:
        """Closes the range of a cell whose end was not reported."""
        if self._range is not None:
            self._range.close()
            self._range = None

    def after(self, *_: Any) -> None:
        """Prints the line; called after a cell ran or raised."""
        line = self.line()
        if line:
            print(line)

    def line(self) -> Optional[str]:
        """Returns the line for the cell that just ended, or ``None`` if the process had no GPU memory during it."""
        first = self._late_line()
        if not self.is_on or self._range is None:
            return first
        self._range.close()
        ended, self._range = self._range, None
        blocks = bool(ended.block_bytes)
        now = self._now(blocks)
        begun = (ended.start_block_bytes if blocks else ended.start_bytes) or 0
        highest = ended.block_bytes if blocks else ended.bytes
        self.last = {
            "live_bytes": now,
            "change_bytes": now - begun,
            "peak_bytes": highest,
            "blocks": blocks,
            "composition": ended.composition,
        }
        if not now and not highest:
            return first
        text = "gpumem: {} {} ({}), peak {}".format(
            "blocks" if blocks else "allocations", amount(now), change(now - begun), amount(highest)
        )
        held = _held()
        if blocks and held is not None:
            text += ", device memory {}".format(amount(held))
        return text if first is None else first + "\n" + text

    def _now(self, blocks: bool) -> int:
        devices: List[Dict[str, Any]] = (snapshot() or {"devices": []})["devices"]
        if blocks:
            return sum(device["block_bytes"] for device in devices)
        return sum(tag["bytes"] for device in devices for tag in device["tags"] if tag["of"] == "direct")

    def _late_line(self) -> Optional[str]:
        """Returns once how much memory a late agent missed."""
        if self._reported_late:
            return None
        how = status()
        if how["state"] == "waiting" or not how["available"]:
            return None
        self._reported_late = True
        if how["state"] != "late":
            return None
        history = how.get("said") or [how]
        cause = "CUDA was initialised before gpumem was loaded" if history[0]["state"] == "late" else "recording was interrupted"
        return "gpumem: late: {}; {}".format(cause, _missed(how["missed"]))


def _missed(lines: List[Dict[str, Any]]) -> str:
    known = [line["bytes"] for line in lines]
    if known and all(bytes is not None for bytes in known):
        return "{} was allocated earlier and has no name".format(amount(sum(known)))
    at_least = sum(line.get("bytes") or line.get("at_least_bytes") or 0 for line in lines)
    if at_least:
        return "at least {} was allocated earlier and has no name".format(amount(at_least))
    return "an unknown amount was allocated earlier (gpumemctl report shows it)"


def _held() -> Optional[int]:
    found = snapshot()
    return None if found is None else sum(device["tracked_bytes"] for device in found["devices"])


_cells: Optional[Cells] = None


def magic(line: str) -> Optional[Dict[str, Any]]:
    """Implements ``%gpumem``.

    Without an argument it returns the current snapshot. ``on`` and ``off`` switch the line after each cell. ``last``
    returns the last cell's figures. ``report`` prints the daemon's report.
    """
    word = line.strip()
    if word in ("on", "off"):
        if _cells is not None:
            _cells.is_on = word == "on"
        return None
    if word == "report":
        from ._ask import report

        print(report() or "gpumem: no daemon listens")
        return None
    if word == "last":
        return None if _cells is None else _cells.last
    return snapshot()


def load(shell: Any) -> None:
    """Registers the cell hooks and ``%gpumem`` with IPython."""
    global _cells
    if _cells is not None:
        return
    _cells = Cells()
    shell.events.register("pre_run_cell", _cells.before)
    shell.events.register("post_run_cell", _cells.after)
    shell.register_magic_function(magic, "line", "gpumem")
    if not available():
        print("gpumem: no agent in this process: no lines will be shown (run gpumemctl doctor for the reason)", file=sys.stderr)
        return
    first = _cells.line()
    if first:
        print(first)


def unload(shell: Any) -> None:
    """Removes the cell hooks."""
    global _cells
    if _cells is not None:
        _cells.after_silently()
        shell.events.unregister("pre_run_cell", _cells.before)
        shell.events.unregister("post_run_cell", _cells.after)
        _cells = None
