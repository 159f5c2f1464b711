"""Reports blocks that PyTorch's allocator held before the agent was loaded."""

import ctypes
import os
from typing import Any, List, Optional

from ._agent import functions

#: Retries if other activity interferes.
TRIES = 10

_SEGMENT, _BLOCK, _PAGE = range(3)
_MIB = 1 << 20


def _has_usual_pages(torch: Any) -> bool:
    """Returns whether large segments are mapped in pages of the default size, which newer releases can change."""
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    settings = [os.environ.get(name, "") for name in names]
    settings += [str(told())] if told is not None else []
    return not any("large_segment_size" in text for text in settings)


def _page_bytes(segment: Any, is_usual: bool) -> int:
    """Returns the page size of an expandable segment in bytes. If the pages are larger in fact, neighbours are freed together."""
    whole = segment["total_size"]
    is_large = is_usual and segment["segment_type"] == "large"
    return 20 * _MIB if is_large and whole % (20 * _MIB) == 0 else 2 * _MIB


def _is_slow(torch: Any) -> bool:
    """Returns whether the allocator records a stack for each block, which makes listing them take seconds."""
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return asked is not None and bool(asked())


def adopt(torch: Any) -> Optional[bool]:
    """Sends the allocator's segments and blocks to a late agent; takes some ms for 10,000 blocks.

    Returns whether the agent accepted them; ``False`` means try again, ``None`` that there is nothing to send.
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
