"""Selects TensorFlow's asynchronous allocator, which makes each tensor a driver allocation that the agent sees.

    import gpumem.tensorflow

    gpumem.tensorflow.use_async_allocator()   # before TensorFlow touches a GPU
    import tensorflow as tf

By default TensorFlow reserves nearly all memory of a GPU at once and carves tensors from it. That code uses virtual
functions and cannot be observed from outside. With ``TF_GPU_ALLOCATOR=cuda_malloc_async`` (TensorFlow 2.6 and later,
CUDA 11.2) tensors are stream-ordered allocations. Kernels run on TensorFlow's own threads, where no scope is open: use
``gpumem.process_tag`` to name their memory.
"""

import os
import sys

_VARIABLE = "TF_GPU_ALLOCATOR"
_ASYNC = "cuda_malloc_async"


def use_async_allocator() -> bool:
    """Sets the allocator by environment variable, unless another one is set.

    Returns whether this takes effect: TensorFlow reads the variable when it creates its GPU devices.
    """
    if os.environ.setdefault(_VARIABLE, _ASYNC) != _ASYNC:
        return False
    return not _has_devices()


def _has_devices() -> bool:
    if "tensorflow" not in sys.modules:
        return False
    try:
        from tensorflow.python.eager import context

        return context.context()._context_handle is not None
    except Exception:  # private, and not everywhere the same
        return True
