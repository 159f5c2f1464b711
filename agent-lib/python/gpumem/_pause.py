"""Lends the process's only CUPTI subscription to another client."""

import contextlib
from typing import Iterator

from ._library import library


def pause() -> None:
    """Releases the CUPTI subscription to another client, such as a profiler; it is free when this returns.

    Driver calls are not recorded until ``resume()``. Works before CUDA is initialised. Calls nest.
    """
    found = library()
    if found is not None:
        found.pause()


def resume() -> None:
    """Takes the CUPTI subscription back, now or as soon as the other client releases it.

    Allocations and frees in between were not recorded: reports show the interval and mark sums as partial.
    """
    found = library()
    if found is not None:
        found.resume()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pauses inside ``with gpumem.paused(): ...`` or a function decorated with ``@gpumem.paused()``.

    Needed for PyTorch's profiler in releases before August 2026 if ``KINETO_USE_DAEMON=1`` cannot be set. That profiler
    keeps the subscription until the process ends, unless ``TEARDOWN_CUPTI=1`` is set; see README.md.
    """
    pause()
    try:
        yield
    finally:
        resume()
