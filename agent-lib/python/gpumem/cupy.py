"""CuPy: blocks of its memory pools, through its own MemoryHook.

    import gpumem.cupy

    with gpumem.cupy.watch():           # or gpumem.cupy.watch().__enter__() once per thread
        with gpumem.scope("solver"):
            x = cupy.zeros(...)

Hooks are a thread's own in CuPy: enter one in each thread that allocates. A block that another thread frees is reported
gone when its address is handed out again. Without this the agent sees the segments that CuPy's pool takes, named by
whoever made it grow.
"""

import threading
from typing import Any, Dict

from ._pool import Pool

_lock = threading.Lock()
_pools: Dict[int, "_Device"] = {}


class _Device:
    """The pool of one device."""

    def __init__(self, device: int) -> None:
        self.pool = Pool("cupy", device)
        self.segments: Dict[int, int] = {}

    def took(self, address: int, size: int) -> None:
        """A segment. What it lies over was given back meanwhile: nothing is told of that."""
        end = address + size
        stale = [start for start, bytes in self.segments.items() if start < end and address < start + bytes]
        for start in stale:
            self.pool.remove_segment(start, self.segments.pop(start))
        self.segments[address] = size
        self.pool.add_segment(address, size)


def _device(number: int) -> _Device:
    with _lock:
        if number not in _pools:
            _pools[number] = _Device(number)
        return _pools[number]


def watch() -> Any:
    """A memory hook for the thread that enters it, a context manager."""
    from cupy.cuda import MemoryHook

    class Hook(MemoryHook):  # type: ignore[misc, unused-ignore]
        name = "gpumem"

        # Called with keywords; newer versions add some.

        def alloc_postprocess(self, **told: Any) -> None:
            if told["mem_ptr"]:
                _device(told["device_id"]).took(told["mem_ptr"], told["mem_size"])

        def malloc_postprocess(self, **told: Any) -> None:
            if told["mem_ptr"]:
                _device(told["device_id"]).pool.add_block(told["mem_ptr"], told["mem_size"])

        def free_postprocess(self, **told: Any) -> None:
            _device(told["device_id"]).pool.free_block(told["mem_ptr"])

    return Hook()


def check() -> None:
    """Compares the blocks of the current device with CuPy's own total; the report says if they differ."""
    import cupy

    number = int(cupy.cuda.runtime.getDevice())
    _device(number).pool.check(int(cupy.get_default_memory_pool().used_bytes()))
