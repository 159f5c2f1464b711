"""TensorFlow: its asynchronous allocator, with which each tensor is a driver call that the agent sees.

    import gpumem.tensorflow

    gpumem.tensorflow.use_async_allocator()   # before TensorFlow touches a GPU
    import tensorflow as tf

By default TensorFlow takes nearly all memory of a GPU at once and carves tensors from it, inside of classes whose
functions are virtual: nothing can be told of them from outside. With ``TF_GPU_ALLOCATOR=cuda_malloc_async`` (TensorFlow 2.6 and
later, CUDA 11.2) tensors are stream-ordered allocations. Kernels run on threads of TensorFlow's, where no scope is
open: set ``gpumem.process_tag`` for those.
"""

import os
import sys

_VARIABLE = "TF_GPU_ALLOCATOR"
_ASYNC = "cuda_malloc_async"


def use_async_allocator() -> bool:
    """Chooses it by environment, unless another one is named there. Whether that comes in time: TensorFlow reads it when
    it makes its GPU devices."""
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
