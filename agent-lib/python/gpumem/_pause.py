"""CUPTI has one subscription per process: giving it to another client for a while."""

import contextlib
from typing import Iterator

from ._library import library


def pause() -> None:
    """Lets another CUPTI client, such as a profiler, have the subscription; it is free when this returns.

    Driver calls are not seen until ``resume()``. May be called before CUDA is initialised. Pauses nest.
    """
    found = library()
    if found is not None:
        found.pause()


def resume() -> None:
    """Takes the subscription back, now or as soon as the other client lets go.

    What was allocated and freed meanwhile is not known: reports name the time and mark the sums as partial.
    """
    found = library()
    if found is not None:
        found.resume()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """``with gpumem.paused(): ...``, or ``@gpumem.paused()`` above a function: paused inside.

    For PyTorch's profiler on a PyTorch from before August 2026, when ``KINETO_USE_DAEMON=1`` cannot be set. That
    profiler keeps the subscription until the process ends, unless ``TEARDOWN_CUPTI=1`` is set; see README.md.
    """
    pause()
    try:
        yield
    finally:
        resume()
