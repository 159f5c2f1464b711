"""Bytes that were allocated before a late agent was loaded."""

import sys
from typing import Any, Dict, List, Optional


def missed() -> List[Dict[str, Any]]:
    """Returns, for each device in use, the bytes allocated before the agent was loaded; ``bytes`` is ``None`` if unknown.

    The daemon compares NVML's charge with the recorded allocations, so contexts and modules are included. Without a daemon,
    the reserved bytes of PyTorch's allocator give a lower bound: ``at_least_bytes``.
    """
    from ._ask import report_json
    from ._snapshot import LIVE, read

    live = read(LIVE) or {"devices": []}
    by_daemon = _of_report(report_json())
    result = []
    for device in live["devices"]:
        ordinal = device["ordinal"]
        line: Dict[str, Any] = {"ordinal": ordinal, "bytes": by_daemon.get(str(device["uuid"]))}
        if line["bytes"] is None:
            at_least = _of_torch(ordinal, device)
            if at_least is not None:
                line["at_least_bytes"] = at_least
        result.append(line)
    return result


def _of_report(report: Optional[Dict[str, Any]]) -> Dict[str, int]:
    """Returns `predates_bytes` of the report by device UUID."""
    found: Dict[str, int] = {}
    for device in (report or {}).get("devices") or []:
        last = device.get("last") or {}
        if isinstance(last.get("predates_bytes"), int):
            found[str(device.get("name"))] = last["predates_bytes"]
    return found


def _of_torch(ordinal: int, device: Dict[str, Any]) -> Optional[int]:
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        reserved = int(torch.cuda.memory_reserved(ordinal))
    except Exception:  # a build without CUDA, an unknown device
        return None
    return max(0, reserved - int(device["tracked_bytes"]))
