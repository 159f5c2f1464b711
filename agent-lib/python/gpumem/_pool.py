"""A pool of the program's own, which carves blocks out of driver allocations."""

from typing import Union

from ._library import library, text


class Pool:
    """What an allocator reports, so that its blocks have names; as in gpumem.h.

    Ids and addresses are those of the device; a stream is any small number of the caller's. Where there is no agent, every
    call does nothing.
    """

    def __init__(self, name: str, device: int = 0, parent: "Union[int, Pool]" = 0) -> None:
        found = library()
        outer = parent.id if isinstance(parent, Pool) else int(parent)
        self._library = found
        #: 0 while nothing is recorded.
        self.id: int = found.pool_create(text(name), device, outer) if found is not None else 0

    def destroy(self) -> None:
        """It is gone, with its segments and blocks."""
        if self._library is not None and self.id:
            self._library.pool_destroy(self.id)
            self.id = 0

    def add_segment(self, address: int, size: int) -> None:
        """It took ``size`` bytes from ``address`` on to carve from."""
        if self._library is not None and self.id:
            self._library.segment_add(self.id, address, size)

    def remove_segment(self, address: int, size: int) -> None:
        """It gave that range back."""
        if self._library is not None and self.id:
            self._library.segment_remove(self.id, address, size)

    def add_block(self, address: int, size: int, stream: int = 0) -> None:
        """It handed out a block."""
        if self._library is not None and self.id:
            self._library.block_alloc(self.id, address, size, stream & 0xFFFFFFFF)

    def free_block(self, address: int, pending: bool = False) -> None:
        """A block came back; ``pending``: a stream may still use it, and a second call follows."""
        if self._library is not None and self.id:
            self._library.block_free(self.id, address, int(pending))

    def state(self, reserved_bytes: int, used_bytes: int) -> None:
        """What it says that it has reserved and handed out, for pools that report no blocks."""
        if self._library is not None and self.id:
            self._library.pool_state(self.id, reserved_bytes, used_bytes)

    def check(self, total_bytes: int) -> None:
        """Its own total of live block bytes, to be compared."""
        if self._library is not None and self.id:
            self._library.pool_check(self.id, total_bytes)

    def retag(self, address: int, path: str, role: int = 0) -> None:
        """What is known by now of a block."""
        if self._library is not None and self.id:
            self._library.retag(self.id, address, text(path), role, 0)
