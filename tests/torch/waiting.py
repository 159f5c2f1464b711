"""Waits for the agent in programs that would end before it has started."""

import os
import sys
import time


def are_frames_read():
    """Returns whether the agent has tested its reading of frames in this process."""
    core = getattr(getattr(sys.modules.get("_gpumem_torch"), "_core", None), "_core", None)
    return core is not None and core.tested is not None


def wait_for_frames():
    end = time.monotonic() + 30
    while "CUDA_INJECTION64_PATH" in os.environ and not are_frames_read():
        assert time.monotonic() < end, "frames are not read"
        time.sleep(0.01)
