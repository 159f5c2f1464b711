"""Reports blocks of CuPy's memory pools, through CuPy's MemoryHook.

    import gpumem.cupy

    with gpumem.cupy.watch():           # or gpumem.cupy.watch().__enter__() once per thread
        with gpumem.scope("solver"):
            x = cupy.zeros(...)

A CuPy hook belongs to one thread: enter one in each thread that allocates. A block that a thread without a hook frees is
reported as freed when its address is reused. Without this module the agent sees only the segments of CuPy's pool, named
after the scope in which the pool grew.
"""

import threading
from typing import Any, Dict

from ._pool import Pool

_lock = threading.Lock()
_pools: Dict[int, "_Device"] = {}


class _Device:
    """Pool of one device."""

    def __init__(self, device: int) -> None:
        self.pool = Pool("cupy", device)
        self.segments: Dict[int, int] = {}

    def add_segment(self, address: int, size: int) -> None:
        """Records a new segment. CuPy does not report freed segments, so segments that overlap it are removed first."""
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
    """Returns a context manager: a memory hook for the thread that enters it."""
    from cupy.cuda import MemoryHook

    class Hook(MemoryHook):  # type: ignore[misc, unused-ignore]
        name = "gpumem"

        # CuPy passes keyword arguments; newer versions add some.

        def alloc_postprocess(self, **event: Any) -> None:
            if event["mem_ptr"]:
                _device(event["device_id"]).add_segment(event["mem_ptr"], event["mem_size"])

        def malloc_postprocess(self, **event: Any) -> None:
            if event["mem_ptr"]:
                _device(event["device_id"]).pool.add_block(event["mem_ptr"], event["mem_size"])

        def free_postprocess(self, **event: Any) -> None:
            _device(event["device_id"]).pool.free_block(event["mem_ptr"])

    return Hook()


def check() -> None:
    """Compares the current device's blocks with CuPy's own total; reports show a difference. Raises if CuPy is absent."""
    import cupy

    number = int(cupy.cuda.runtime.getDevice())
    _device(number).pool.check(int(cupy.get_default_memory_pool().used_bytes()))
