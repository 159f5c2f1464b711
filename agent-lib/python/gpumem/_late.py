"""What was there before the agent: bytes that a late one has missed."""

import sys
from typing import Any, Dict, List, Optional


def missed() -> List[Dict[str, Any]]:
    """Per device that is used, bytes older than the agent; ``None`` where nobody knows.

    The daemon compares what NVML charges with what the agent has seen, so contexts and modules are in it. Without one, PyTorch's allocator knows what it had
    reserved, which is a lower bound: ``at_least``.
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
    """`predates` of the report, by UUID."""
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
    except Exception:  # a build without CUDA, a device that it does not know
        return None
    return max(0, reserved - int(device["tracked_bytes"]))
