"""What PyTorch's allocator had before the agent came."""

import ctypes
import os
from typing import Any, List, Optional

from ._agent import functions

#: Times that something else may have happened meanwhile.
TRIES = 10

_SEGMENT, _BLOCK, _PAGE = range(3)
_MIB = 1 << 20


def _has_usual_pages(torch: Any) -> bool:
    """Nobody has set the size of the pieces that large segments are mapped in (newer releases can)."""
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    settings = [os.environ.get(name, "") for name in names]
    settings += [str(told())] if told is not None else []
    return not any("large_segment_size" in text for text in settings)


def _page_bytes(segment: Any, is_usual: bool) -> int:
    """What an expandable segment is mapped in. Should it be larger pieces, theirs are neighbours that go together."""
    whole = segment["total_size"]
    is_large = is_usual and segment["segment_type"] == "large"
    return 20 * _MIB if is_large and whole % (20 * _MIB) == 0 else 2 * _MIB


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
        is_usual = _has_usual_pages(torch)
        segments = cuda.memory_snapshot()
        parts: List[int] = []
        for segment in segments:
            device, address, bytes_ = segment["device"], segment["address"], segment["total_size"]
            if segment.get("is_expandable"):
                page = _page_bytes(segment, is_usual)
                for at in range(address, address + bytes_, page):
                    parts += (device, _PAGE, at, page)
            else:
                parts += (device, _SEGMENT, address, bytes_)
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    parts += (device, _BLOCK, address, block["size"])
                address += block["size"]
    except Exception:  # another allocator, which has no such list
        return None
    return bool(functions.adopt((ctypes.c_uint64 * len(parts))(*parts), len(parts) // 4) != 0)
