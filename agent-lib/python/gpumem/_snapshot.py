"""What this process holds now, and how the agent is: read from the agent in the process, with or without a daemon."""

import ctypes
import json
import os
from typing import Any, Dict, Optional

from ._library import Library, library

LIVE, STATUS, HIGH = 0, 1, 2


def read(what: int) -> Optional[Dict[str, Any]]:
    """A JSON text of the agent's, as an object."""
    found = library()
    if found is None or not found.available():
        return None
    text = _text(found, what)
    return json.loads(text) if text else None


def _text(found: Library, what: int) -> bytes:
    """It may grow between two calls."""
    room = 1 << 16
    for _ in range(8):
        buffer = ctypes.create_string_buffer(room)
        length = found.snapshot(what, buffer, room)
        if length <= room:
            return buffer.raw[:length]
        room = length + length // 4
    return b""


def snapshot() -> Optional[Dict[str, Any]]:
    """What this process holds now, in bytes; ``None`` without an agent. Per device of ``devices``:

    ==================== ==========================================================================
    ``ordinal``          CUDA's number of the device; ``uuid`` as NVML writes it
    ``tracked_bytes``    live driver allocations; of driver pools what they have reserved
    ``direct_bytes``     of these, what no framework's pool carves; ``direct`` is how many
    ``block_bytes``      blocks of pools; ``blocks`` is how many, ``pending_bytes`` of them wait for a stream
    ``pool_idle_bytes``  what pools have and no block covers
    ``opaque_bytes``     pools that report no blocks
    ``unseen_bytes``     of pools, what lies in allocations that the agent did not see
    ``roles``            bytes of blocks and direct allocations by role; ``unknown`` is one of them
    ``pools``            each pool: ``name``, ``owner``, ``segments``, ``segment_bytes``, ``blocks``, ``block_bytes``, ``idle_bytes``
    ``tags``             ``path``, ``role``, ``phase``, ``bytes``, ``count``; ``of`` is ``blocks`` or ``direct``
    ==================== ==========================================================================

    ``direct + block + pool_idle + opaque = tracked + unseen``, and the tags of ``blocks`` and ``direct`` add up to theirs,
    exactly, unless other threads allocate meanwhile. ``host`` has memory that is in no device's sum, by kind. What was there
    before the agent is not known and in no figure; see ``status()``.
    """
    found = read(LIVE)
    if found is None:
        return None
    for device in found["devices"]:
        roles: Dict[str, int] = {}
        for tag in device["tags"]:
            roles[tag["role"]] = roles.get(tag["role"], 0) + tag["bytes"]
        device["roles"] = roles
    return found


def status() -> Dict[str, Any]:
    """How well this process is seen. Always a dict:

    ``available``  whether an agent records here
    ``state``      ``covered``, ``late`` (it came after the first allocation), ``blocked`` (another client has CUPTI; ``detail`` says
                   who), ``paused``, ``disarmed``, ``waiting`` (CUDA has not begun), or ``absent``
    ``missed``     per device, bytes that are older than the agent, as PyTorch's allocator and the daemon know them:
                   ``{"ordinal": 0, "bytes": n}`` with ``None`` where nobody knows. Empty unless ``late``
    ``layers``     ways in which memory gets its names: ``layer``, ``state``, ``reason``
    ``said``       everything the agent said of itself: ``since_ns``, ``state``, ``detail``
    ``connected``  whether a daemon listens; ``recording`` is the file that is written instead, if any
    ``recorded``, ``lost``, ``rows_refused``, ``names_refused``  counts
    """
    found = read(STATUS)
    if found is None:
        return {"available": False, "state": "absent", "detail": "", "pid": os.getpid(), "missed": [], "layers": []}
    now: Dict[str, Any] = found["said"][-1] if found["said"] else {"state": "waiting", "detail": ""}
    found.update(available=True, state=now["state"], detail=now["detail"], missed=[])
    if now["state"] == "late":
        from ._late import missed

        found["missed"] = missed()
    return found
