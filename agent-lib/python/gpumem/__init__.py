"""What a program says to the agent of gpumemd in its own process.

Every function may be called at any time, from any thread, and does nothing where there is no agent: no
``gpumemctl run``, no ``CUDA_INJECTION64_PATH``, no GPU. None of them raises.

    available()               whether an agent is there and records
    pause(), resume()         CUPTI for another client meanwhile
    paused()                  the same as a context manager or decorator

Modules, one subject each: ``_library`` finds the agent, ``_pause`` has the functions about CUPTI.
"""

from ._library import available
from ._pause import pause, paused, resume

__all__ = ["available", "pause", "paused", "resume"]
__version__ = "0.1.0"
