"""A pool of the program's own, which carves blocks out of driver allocations."""

from typing import Optional, Union

from ._library import Library, library, text


class Pool:
    """What an allocator reports, so that its blocks have names; as in gpumem.h.

    Addresses are those of the device, ``device`` is CUDA's ordinal; a stream is any small number of the caller's. ``parent``: the
    pool whose blocks this one carves. Where there is no agent, every call does nothing. The agent hears of the pool with the
    first thing that is said of it: by then CUDA has begun, and the device has a name.
    """

    def __init__(self, name: str, device: int = 0, parent: Optional["Union[int, Pool]"] = None) -> None:
        self._name, self._device, self._parent = name, device, parent
        self._id = 0
        self._gone = False

    @property
    def id(self) -> int:
        """Its number with the agent; 0 while nothing is recorded, and when it is gone."""
        if self._id == 0 and not self._gone:
            found = library()
            if found is not None and found.available():
                outer = self._parent.id if isinstance(self._parent, Pool) else int(self._parent or 0)
                self._id = found.pool_create(text(self._name), self._device, outer)
        return self._id

    def _agent(self) -> Optional[Library]:
        return library() if self.id else None

    def destroy(self) -> None:
        """It is gone, with its segments and blocks."""
        found = library()
        if found is not None and self._id:
            found.pool_destroy(self._id)
        self._id, self._gone = 0, True

    def add_segment(self, address: int, size: int) -> None:
        """It took ``size`` bytes from ``address`` on to carve from."""
        found = self._agent()
        if found is not None:
            found.segment_add(self._id, address, size)

    def remove_segment(self, address: int, size: int) -> None:
        """It gave that range back."""
        found = self._agent()
        if found is not None:
            found.segment_remove(self._id, address, size)

    def add_block(self, address: int, size: int, stream: int = 0) -> None:
        """It handed out a block."""
        found = self._agent()
        if found is not None:
            found.block_alloc(self._id, address, size, stream & 0xFFFFFFFF)

    def free_block(self, address: int, pending: bool = False) -> None:
        """A block came back; ``pending``: a stream may still use it, and a second call follows."""
        found = self._agent()
        if found is not None:
            found.block_free(self._id, address, int(pending))

    def state(self, reserved_bytes: int, used_bytes: int) -> None:
        """What it says that it has reserved and handed out, for pools that report no blocks."""
        found = self._agent()
        if found is not None:
            found.pool_state(self._id, reserved_bytes, used_bytes)

    def check(self, total_bytes: int) -> None:
        """Its own total of live block bytes, to be compared."""
        found = self._agent()
        if found is not None:
            found.pool_check(self._id, total_bytes)

    def retag(self, address: int, path: str, role: int = 0) -> None:
        """What is known by now of a block."""
        found = self._agent()
        if found is not None:
            found.retag(self._id, address, text(path), role, 0)
