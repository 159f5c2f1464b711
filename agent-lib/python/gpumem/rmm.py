"""Reports blocks of an RMM memory resource, through RMM's CallbackMemoryResource.

    import rmm, gpumem.rmm

    gpumem.rmm.watch(lambda upstream: rmm.mr.PoolMemoryResource(upstream, initial_pool_size=2**30))
    # or, over the current resource:
    gpumem.rmm.watch()

With a function that makes the pool, the pool's segments are reported too, which separates idle from used memory. Each
allocation costs two Python calls; RMM's authors recommend this for debugging. A CudaMemoryResource does not need it: the
agent sees each of its allocations directly.
"""

from typing import Any, Callable, Optional

from ._pool import Pool


class Watched:
    """Memory resource that reports to the agent and forwards to another one. As a context manager it ends with ``undo``."""

    def __init__(self, make_pool: Optional[Callable[[Any], Any]], upstream: Any, device: int, name: str) -> None:
        import rmm.mr as mr

        self._mr, self._device = mr, device
        self.before = mr.get_per_device_resource(device)
        self.pool = Pool(name, device)
        below = self.before if upstream is None else upstream
        self._whole = make_pool is not None
        if make_pool is not None:
            self._below = below
            self._segments = mr.CallbackMemoryResource(self._take, self._give)
            below = make_pool(self._segments)
        self._inner = below
        self.resource = mr.CallbackMemoryResource(self._allocate, self._free)
        mr.set_per_device_resource(device, self.resource)

    def _take(self, size: int, stream: Any) -> int:
        address = int(self._below.allocate(size, stream))
        self.pool.add_segment(address, size)
        return address

    def _give(self, address: int, size: int, stream: Any) -> None:
        self.pool.remove_segment(address, size)
        self._below.deallocate(address, size, stream)

    def _allocate(self, size: int, stream: Any) -> int:
        address = int(self._inner.allocate(size, stream))
        if size and address:
            if not self._whole:
                self.pool.add_segment(address, size)  # where the pool's own lie is not known
            self.pool.add_block(address, size)
        return address

    def _free(self, address: int, size: int, stream: Any) -> None:
        if size and address:
            self.pool.free_block(address)
            if not self._whole:
                self.pool.remove_segment(address, size)
        self._inner.deallocate(address, size, stream)

    def undo(self) -> None:
        """Restores the previous resource. Live blocks are still freed through this object: keep it until they are gone."""
        self._mr.set_per_device_resource(self._device, self.before)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def watch(
    make_pool: Optional[Callable[[Any], Any]] = None, upstream: Any = None, device: int = 0, name: str = "rmm"
) -> Watched:
    """Reports blocks of a device's memory resource from now on.

    ``make_pool`` builds the pool over a given resource, ``upstream`` defaults to the device's current resource,
    ``device`` is
    the CUDA ordinal and ``name`` the pool's name in reports.
    """
    return Watched(make_pool, upstream, device, name)
