"""Allocates with JAX in stages; prints its allocator's own numbers after each."""

import jax
import jax.numpy as jnp
from torch_common import say, wait

device = next(d for d in jax.devices() if d.platform == "gpu")


def state(stage):
    stats = device.memory_stats() or {}
    allocated = stats.get("bytes_in_use", 0)
    say(stage=stage, reserved=stats.get("pool_bytes", allocated), allocated=allocated)
    wait()


kept = [jax.device_put(jnp.zeros(n << 20, dtype=jnp.uint8), device) for n in (1, 3, 12, 50)]
jax.block_until_ready(kept)
state("arrays")
x = jnp.ones((2048, 2048))
y = jax.jit(lambda a: (a @ a).sum())(x)
y.block_until_ready()
state("a compiled matrix product")
del kept
state("arrays gone")
say(end=True, version=jax.__version__)
