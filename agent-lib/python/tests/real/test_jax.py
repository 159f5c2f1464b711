"""gpumem.jax with the real JAX on the CPU in place of a GPU: arrays, buffers, shards, trees and profiles are real."""

import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from test_adapters import Recorder  # noqa: E402

import gpumem.jax  # noqa: E402
from gpumem import _library  # noqa: E402


class Real(unittest.TestCase):
    def setUp(self):
        self.agent = Recorder()
        for patch in [
            mock.patch.object(_library, "_found", self.agent),
            mock.patch.object(gpumem.jax, "_PLATFORMS", ("cpu",)),
        ]:
            patch.start()
            self.addCleanup(patch.stop)
        gpumem.jax._pools.clear()
        gpumem.jax._seen.clear()

    def sizes(self):
        return {self.agent.names[pool][1]: sorted(blocks.values()) for pool, blocks in self.agent.blocks.items()}

    def test_arrays_come_and_go(self):
        base = gpumem.jax.look()
        params = {"dense": {"kernel": jnp.ones((256, 128)), "bias": jnp.zeros(128)}, "steps": [jnp.ones(64, jnp.int8)]}
        total = 256 * 128 * 4 + 128 * 4 + 64
        self.assertEqual(gpumem.jax.look() - base, total)
        self.assertEqual(gpumem.jax.name("params", params, role="parameter"), 3)
        paths = {path for path, role in self.agent.tags.values() if role == 1}
        self.assertEqual(paths, {"params/dense/kernel", "params/dense/bias", "params/steps/0"})
        out = jax.jit(lambda p: p["dense"]["kernel"] * 2)(params)
        self.assertEqual(gpumem.jax.look() - base, total + out.nbytes)
        self.assertIn(("jax/float32[256,128]", 0), self.agent.tags.values())
        out.delete()
        del params
        self.assertEqual(gpumem.jax.look(), base)

    def test_a_sharded_array_is_a_block_on_each_device(self):
        base = gpumem.jax.look()
        before = self.sizes()
        mesh = jax.sharding.Mesh(jax.devices(), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        array = jax.device_put(jnp.ones((64, 64)), sharding)
        array.block_until_ready()
        self.assertEqual(gpumem.jax.look() - base, 64 * 64 * 4)
        for device in (0, 1):
            self.assertEqual(len(self.sizes()[device]), len(before.get(device, [])) + 1)
            self.assertIn(32 * 64 * 4, self.sizes()[device])

    def test_the_profile_is_saved(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "memory.prof")
            size = gpumem.jax.save_profile(path)
            with open(path, "rb") as file:
                data = file.read()
        self.assertEqual((len(data), data[:2]), (size, b"\x1f\x8b"))


if __name__ == "__main__":
    unittest.main()
