"""What is recorded, and where to: files beside what the daemon is told, and history that is kept back."""

import contextlib
import os
from typing import Iterator, Optional, Union

from ._library import library

Path = Union[str, "os.PathLike[str]"]


def configure(key: str, value: object) -> bool:
    """Sets a key of the agent's (gpumem.h has them: ``marks``, ``ranges``, ``api``, ``memory``, ``record_file``, ``dump_file``,
    ``dump_period``). Whether there is such a key, and the value is one for it."""
    found = library()
    if found is None:
        return False
    spelt = str(int(value)) if isinstance(value, bool) else str(value)
    return bool(found.configure(key.encode(), spelt.encode("utf-8", "surrogateescape")))


def start(path: Optional[Path] = None) -> bool:
    """Begins a recording beside what the daemon is told: the state, and all that happens from here on. ``path``: a new
    file, or a folder; without one what was configured, or a name with host, rank and pid. Whether one goes on now."""
    found = library()
    if found is None or path is not None and not configure("record_file", os.fspath(path)):
        return False
    return bool(found.start())


def stop() -> bool:
    """Ends it. Whether everything up to here is in it."""
    found = library()
    return found is not None and bool(found.stop())


def dump(path: Optional[Path] = None, finished: bool = False) -> bool:
    """Writes what is held now to a new file; without a path, what the recording that goes on lacks. ``finished``: ends that
    recording. Whether it is written."""
    found = library()
    name = b"" if path is None else os.fsencode(path)
    return found is not None and bool(found.dump(name, int(finished)))


def mute() -> None:
    """Keeps the history back: allocations go on to be booked, but are told to nobody until ``unmute()``, which tells
    the state as it is then. Calls nest. See ``pause`` for what lends CUPTI to a profiler."""
    found = library()
    if found is not None:
        found.mute()


def unmute() -> None:
    """See ``mute``."""
    found = library()
    if found is not None:
        found.unmute()


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """``mute()`` and ``unmute()`` as a context manager or decorator."""
    mute()
    try:
        yield
    finally:
        unmute()
