"""Settings of the agent, and recordings to files."""

import contextlib
import os
from typing import Iterator, Optional, Union

from . import _scope
from ._library import library, text

_Path = Union[str, "os.PathLike[str]"]


def configure(key: str, value: object) -> bool:
    """Sets a key of the agent. Returns ``False`` for an unknown key, an invalid value, or without an agent.

    Keys are ``marks``, ``ranges``, ``api``, ``memory`` (``on`` or ``off``), ``record_file``, ``record_steps`` (``"100:110"``),
    ``record_for`` (seconds), ``record_max_size`` (bytes), ``dump_file`` and ``dump_period`` (seconds). gpumem.h explains them.
    """
    found = library()
    if isinstance(value, bool):
        value = "on" if value else "off"
    done = found is not None and bool(found.configure(text(key), text(value)))
    if done and key == "ranges":
        _scope.record_edges(str(value).lower() in ("1", "true", "on", "yes"))
    return done


def start(path: Optional[_Path] = None) -> bool:
    """Starts a recording to a new file, or to a file in a given folder. Returns whether a recording is active.

    Read the file with ``gpumemctl report FILE``, also while it grows.
    """
    found = library()
    if found is None or (path is not None and not configure("record_file", os.fspath(path))):
        return False
    return bool(found.start())


def stop() -> bool:
    """Stops the recording. Returns ``True`` if the file is complete, or if no recording was active."""
    found = library()
    return found is not None and bool(found.stop())


@contextlib.contextmanager
def record(path: Optional[_Path] = None) -> Iterator[bool]:
    """Records the current state and every event inside ``with gpumem.record("run.gpumem"): ...``."""
    begun = start(path)
    try:
        yield begun
    finally:
        if begun:
            stop()


def dump(path: Optional[_Path] = None, finished: bool = False) -> bool:
    """Writes the current state to a new file, or flushes the active recording; returns whether it was written.

    ``finished=True`` also stops an active recording.
    """
    found = library()
    return found is not None and bool(found.dump(text(os.fspath(path) if path is not None else ""), int(finished)))


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Stops sending events inside, while allocations are still tracked.

    At the end the agent sends the number of withheld events and the current state. (Inside ``paused()`` nothing is tracked.)
    """
    found = library()
    if found is not None:
        found.mute()
    try:
        yield
    finally:
        if found is not None:
            found.unmute()
