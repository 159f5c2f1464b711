"""Current memory of this process and status of the agent, read from the agent itself, with or without a daemon."""

import ctypes
import json
import os
from typing import Any, Dict, Optional

from ._library import Library, library

LIVE, STATUS, HIGH = 0, 1, 2


def read(what: int) -> Optional[Dict[str, Any]]:
    """Reads one of the agent's JSON documents; ``None`` without an agent."""
    found = library()
    if found is None or not found.available():
        return None
    text = _text(found, what)
    return json.loads(text) if text else None


def _text(found: Library, what: int) -> bytes:
    """Returns the document's bytes. Retries with a larger buffer, because it may grow between two calls."""
    room = 1 << 16
    for _ in range(8):
        buffer = ctypes.create_string_buffer(room)
        length = found.snapshot(what, buffer, room)
        if length <= room:
            return buffer.raw[:length]
        room = length + length // 4
    return b""


def snapshot() -> Optional[Dict[str, Any]]:
    """Returns the current memory of this process in bytes; ``None`` without an agent. Each entry of ``devices`` has:

    ==================== ==========================================================================
    ``ordinal``          CUDA ordinal of the device; ``uuid`` in NVML's notation
    ``tracked_bytes``    live driver allocations; driver pools count with their reserved bytes
    ``direct_bytes``     driver allocations outside any framework's pool; ``direct`` is their number
    ``block_bytes``      live pool blocks; ``blocks`` is their number, ``pending_bytes`` the part that waits for a stream
    ``pool_idle_bytes``  pool memory without a live block
    ``opaque_bytes``     memory of pools that do not report blocks
    ``unseen_bytes``     pool memory in allocations that the agent did not record
    ``roles``            bytes of blocks and direct allocations by role, including ``unknown``
    ``pools``            for each pool: ``name``, ``owner``, ``segments``, ``segment_bytes``, ``blocks``, ``block_bytes``, ``idle_bytes``
    ``tags``             for each tag: ``path``, ``role``, ``phase``, ``bytes``, ``count``; ``of`` is ``blocks`` or ``direct``
    ==================== ==========================================================================

    ``direct + block + pool_idle + opaque = tracked + unseen``, and the ``tags`` of ``blocks`` and ``direct`` sum to these
    amounts exactly, unless other threads allocate during the call. ``host`` holds memory outside any device's sums, by kind.
    Memory allocated before the agent was loaded is in no figure; see ``status()``.
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
    """Returns how completely the agent sees this process. Always a dict:

    ``available``  whether an agent is recording here
    ``state``      ``covered``, ``late`` (loaded after the first allocation), ``blocked`` (another client holds CUPTI; ``detail``
                   names it), ``paused``, ``disarmed``, ``waiting`` (CUDA is not initialised), or ``absent``
    ``missed``     for each device, bytes allocated before the agent was loaded, from PyTorch's allocator and the daemon:
                   ``{"ordinal": 0, "bytes": n}``; ``bytes`` is ``None`` if unknown. Empty unless ``late``
    ``layers``     sources of memory names: ``layer``, ``state``, ``reason``
    ``said``       every status that the agent has reported: ``since_ns``, ``state``, ``detail``
    ``connected``  whether a daemon is connected; ``recording`` is the file written in its place (``GPUMEM_RECORD``), if any
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
