"""Whether the agent records."""

from ._library import library


def start() -> bool:
    """Records again after ``stop()``. Whether the library can."""
    found = library()
    if found is None or "start" in found.missing:
        return False
    found.start()
    return True


def stop() -> bool:
    """Records no events from now on; balances are kept. Whether the library can."""
    found = library()
    if found is None or "stop" in found.missing:
        return False
    found.stop()
    return True
