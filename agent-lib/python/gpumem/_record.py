"""What the agent records, and where to."""

import contextlib
import os
from typing import Iterator, Optional, Union

from . import _scope
from ._library import library, text

_Path = Union[str, "os.PathLike[str]"]


def configure(key: str, value: object) -> bool:
    """Sets a key of the agent: ``marks``, ``ranges``, ``api``, ``memory`` (``on`` or ``off``), ``record_file``, ``record_steps``
    (``"100:110"``), ``record_for`` (seconds), ``record_max_size`` (bytes), ``dump_file``, ``dump_period`` (seconds); gpumem.h says what they do. ``False`` for no such key or value, and without an agent."""
    found = library()
    if isinstance(value, bool):
        value = "on" if value else "off"
    done = found is not None and bool(found.configure(text(key), text(value)))
    if done and key == "ranges":
        _scope.tell_edges(str(value).lower() in ("1", "true", "on", "yes"))
    return done


def start(path: Optional[_Path] = None) -> bool:
    """Begins a recording: a new file, or a folder that gets one; ``gpumemctl report FILE`` reads it. Whether one goes on now."""
    found = library()
    if found is None or (path is not None and not configure("record_file", os.fspath(path))):
        return False
    return bool(found.start())


def stop() -> bool:
    """Ends the recording. Whether it is whole, or there was none."""
    found = library()
    return found is not None and bool(found.stop())


@contextlib.contextmanager
def record(path: Optional[_Path] = None) -> Iterator[bool]:
    """``with gpumem.record("run.gpumem"): ...``: a recording of what happens inside, with the state that it begins with."""
    begun = start(path)
    try:
        yield begun
    finally:
        if begun:
            stop()


def dump(path: Optional[_Path] = None, finished: bool = False) -> bool:
    """Writes the state of now to a new file, or to the recording that goes on; ``finished`` ends that. Whether it is written."""
    found = library()
    return found is not None and bool(found.dump(text(os.fspath(path) if path is not None else ""), int(finished)))


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """History is kept back inside: allocations are watched and booked, and told to nobody. Their number is told afterwards, and the
    state anew. (Inside ``paused()``, nothing is watched.)"""
    found = library()
    if found is not None:
        found.mute()
    try:
        yield
    finally:
        if found is not None:
            found.unmute()
