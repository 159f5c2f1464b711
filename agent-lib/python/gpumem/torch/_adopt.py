"""What PyTorch's allocator had before the agent came."""

import ctypes
from typing import Any, List, Optional

from ._agent import functions

#: Times that something else may have happened meanwhile.
TRIES = 10


def _is_slow(torch: Any) -> bool:
    """The list would come with a stack for each block, which takes seconds."""
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return asked is not None and bool(asked())


def adopt(torch: Any) -> Optional[bool]:
    """Tells the agent, if it came late; whether it has taken all over, or else is to be told again. ``None``: there is nothing to tell.
    The allocator is asked for its own list: some ms for 10,000 blocks.
    """
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized() or _is_slow(torch) or functions.adoption_begins() == 0:
        return None
    try:
        segments = cuda.memory_snapshot()
        parts: List[int] = []
        for segment in segments:
            if segment.get("is_expandable"):
                continue  # mapped piece by piece: of no one allocation
            device, address = segment["device"], segment["address"]
            parts += (device, 0, address, segment["total_size"])
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    parts += (device, 1, address, block["size"])
                address += block["size"]
    except Exception:  # another allocator, which has no such list
        return None
    return bool(functions.adopt((ctypes.c_uint64 * len(parts))(*parts), len(parts) // 4) != 0)
