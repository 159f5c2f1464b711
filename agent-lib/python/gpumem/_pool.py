"""Reports the program's own allocator, which carves blocks out of driver allocations."""

from typing import Optional, Union

from ._library import Library, library, text


class Pool:
    """Reports the segments and blocks of an allocator, so that its memory has names; see also gpumem.h.

    Addresses are device addresses, sizes are bytes, ``device`` is the CUDA ordinal, ``stream`` any small number the caller
    chooses. ``parent`` is the pool whose blocks this one carves. Without an agent every call does nothing. The pool is
    registered with its first report, because the device is known only after CUDA is initialised.
    """

    def __init__(self, name: str, device: int = 0, parent: Optional["Union[int, Pool]"] = None) -> None:
        self._name, self._device, self._parent = name, device, parent
        self._id = 0
        self._gone = False

    @property
    def id(self) -> int:
        """The agent's id of this pool; 0 while nothing is recorded and after ``destroy``."""
        if self._id == 0 and not self._gone:
            found = library()
            if found is not None and found.available():
                outer = self._parent.id if isinstance(self._parent, Pool) else int(self._parent or 0)
                self._id = found.pool_create(text(self._name), self._device, outer)
        return self._id

    def _agent(self) -> Optional[Library]:
        return library() if self.id else None

    def destroy(self) -> None:
        """Removes the pool with its segments and blocks."""
        found = library()
        if found is not None and self._id:
            found.pool_destroy(self._id)
        self._id, self._gone = 0, True

    def add_segment(self, address: int, size: int) -> None:
        """Reports ``size`` bytes at ``address`` that the pool obtained to carve blocks from."""
        found = self._agent()
        if found is not None:
            found.segment_add(self._id, address, size)

    def remove_segment(self, address: int, size: int) -> None:
        """Reports that the pool released this range."""
        found = self._agent()
        if found is not None:
            found.segment_remove(self._id, address, size)

    def add_block(self, address: int, size: int, stream: int = 0) -> None:
        """Reports a block of ``size`` bytes that the pool handed out."""
        found = self._agent()
        if found is not None:
            found.block_alloc(self._id, address, size, stream & 0xFFFFFFFF)

    def free_block(self, address: int, pending: bool = False) -> None:
        """Reports a returned block. With ``pending`` a stream may still use it; a second call without it must follow."""
        found = self._agent()
        if found is not None:
            found.block_free(self._id, address, int(pending))

    def state(self, reserved_bytes: int, used_bytes: int) -> None:
        """Sets the pool's reserved and used bytes, for pools that do not report blocks."""
        found = self._agent()
        if found is not None:
            found.pool_state(self._id, reserved_bytes, used_bytes)

    def check(self, total_bytes: int) -> None:
        """Passes the pool's own total of live block bytes; the daemon compares it with the reported blocks."""
        found = self._agent()
        if found is not None:
            found.pool_check(self._id, total_bytes)

    def retag(self, address: int, path: str, role: int = 0) -> None:
        """Sets the tag path and role (a number of gpumem.h, 0 for unknown) of a live block."""
        found = self._agent()
        if found is not None:
            found.retag(self._id, address, text(path), role, 0)
