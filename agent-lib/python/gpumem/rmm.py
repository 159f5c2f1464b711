"""RMM: blocks of a memory resource, through its CallbackMemoryResource.

    import rmm, gpumem.rmm

    gpumem.rmm.watch(lambda upstream: rmm.mr.PoolMemoryResource(upstream, initial_pool_size=2**30))
    # or, over whatever is in use already:
    gpumem.rmm.watch()

With a function that makes the pool, its segments are reported too, so that idle memory is told from used. Each allocation costs
two calls of Python: RMM's authors advise it for finding problems. Over a CudaMemoryResource nothing of this is needed: the
agent sees each allocation as it is.
"""

from typing import Any, Callable, Optional

from ._pool import Pool


class Watched:
    """A resource that reports, in the place of another one. Also a context manager, which puts the other one back."""

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
        """Puts the other resource back. Blocks that live are still freed here: keep this object until they are gone."""
        self._mr.set_per_device_resource(self._device, self.before)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def watch(
    make_pool: Optional[Callable[[Any], Any]] = None, upstream: Any = None, device: int = 0, name: str = "rmm"
) -> Watched:
    """Reports what the resource of a device hands out, from now on."""
    return Watched(make_pool, upstream, device, name)
