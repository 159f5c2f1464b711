"""Allocates with CuPy's memory pool in stages; prints the pool's own numbers after each."""

import cupy
from torch_common import say, wait

pool = cupy.get_default_memory_pool()


def state(stage):
    cupy.cuda.runtime.deviceSynchronize()
    say(stage=stage, reserved=pool.total_bytes(), allocated=pool.used_bytes())
    wait()


cupy.cuda.runtime.free(0)  # the context
state("start")
kept = [cupy.empty(n << 20, dtype=cupy.uint8) for n in (1, 3, 12, 50)]
state("arrays")
del kept
state("freed into the pool")
pool.free_all_blocks()
state("given back")
say(end=True, version=cupy.__version__)
