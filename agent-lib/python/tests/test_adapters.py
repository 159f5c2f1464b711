"""Adapters, tested with replicas of the interfaces of CuPy 14.2, RMM 26.10 and JAX 0.10.2 and a recording agent.

No GPU is used: docs/frameworks.md lists what has not been tested on one.
"""

import os
import pathlib
import subprocess
import sys
import threading
import types
import unittest
from unittest import mock

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PACKAGE))

import gpumem  # noqa: E402
import gpumem.cupy  # noqa: E402
import gpumem.jax  # noqa: E402
import gpumem.rmm  # noqa: E402
import gpumem.tensorflow  # noqa: E402
from gpumem import _library  # noqa: E402


class Recorder:
    """Records the pools that the adapters report."""

    missing = ()

    def __init__(self):
        self.names, self.segments, self.blocks, self.tags, self.states, self.checks = {}, {}, {}, {}, {}, {}
        self.lock = threading.Lock()

    def available(self):
        return 1

    def pool_create(self, name, device, parent):
        number = len(self.names) + 1
        self.names[number] = (name.decode(), device)
        self.segments[number], self.blocks[number] = {}, {}
        return number

    def segment_add(self, pool, address, size):
        self.segments[pool][address] = size

    def segment_remove(self, pool, address, size):
        assert self.segments[pool].pop(address) == size

    def block_alloc(self, pool, address, size, stream):
        self.blocks[pool][address] = size

    def block_free(self, pool, address, pending):
        self.blocks[pool].pop(address, None)

    def retag(self, pool, address, path, role, phase):
        self.tags[address] = (path.decode(), role)

    def pool_state(self, pool, reserved, used):
        self.states[pool] = (reserved, used)

    def pool_check(self, pool, total):
        self.checks[pool] = total


class Case(unittest.TestCase):
    def setUp(self):
        self.agent = Recorder()
        patch = mock.patch.object(_library, "_found", self.agent)
        patch.start()
        self.addCleanup(patch.stop)

    def modules(self, **modules):
        patch = mock.patch.dict(sys.modules, {name.replace("__", "."): module for name, module in modules.items()})
        patch.start()
        self.addCleanup(patch.stop)


class CuPy(Case):
    def setUp(self):
        super().setUp()
        hooks = {}

        class MemoryHook:
            name = "MemoryHook"

            def __enter__(self):
                if self.name in hooks:
                    raise KeyError(self.name)
                hooks[self.name] = self
                return self

            def __exit__(self, *_):
                del hooks[self.name]

        self.hooks = hooks
        cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
        cupy.cuda, cuda.MemoryHook = cuda, MemoryHook
        cuda.runtime = types.SimpleNamespace(getDevice=lambda: 1)
        cupy.get_default_memory_pool = lambda: types.SimpleNamespace(used_bytes=lambda: 1536)
        self.modules(cupy=cupy, cupy__cuda=cuda)
        gpumem.cupy._pools.clear()

    def tell(self, what, **told):
        for hook in list(self.hooks.values()):
            getattr(hook, what + "_postprocess")(**told)

    def test_blocks_and_segments(self):
        with gpumem.cupy.watch():
            self.tell("alloc", device_id=1, mem_size=4096, mem_ptr=0x1000)
            self.tell("malloc", device_id=1, size=500, mem_size=512, mem_ptr=0x1000, pmem_id=7)
            self.tell("malloc", device_id=1, size=1000, mem_size=1024, mem_ptr=0x1200, pmem_id=8)
            self.tell("malloc", device_id=1, size=1 << 40, mem_size=1 << 40, mem_ptr=0, pmem_id=0)
            gpumem.cupy.check()
            self.tell("free", device_id=1, mem_size=512, mem_ptr=0x1000, pmem_id=7)
        self.assertEqual(self.agent.names, {1: ("cupy", 1)})
        self.assertEqual((self.agent.segments[1], self.agent.blocks[1]), ({0x1000: 4096}, {0x1200: 1024}))
        self.assertEqual(self.agent.checks, {1: 1536})
        self.assertEqual(self.hooks, {})

    def test_new_segment_replaces_freed_overlapping_one(self):
        with gpumem.cupy.watch():
            self.tell("alloc", device_id=0, mem_size=4096, mem_ptr=0x1000)
            self.tell("alloc", device_id=0, mem_size=4096, mem_ptr=0x3000)
            self.tell("alloc", device_id=0, mem_size=8192, mem_ptr=0x800)
        self.assertEqual(self.agent.segments[1], {0x800: 8192, 0x3000: 4096})


class RMM(Case):
    def setUp(self):
        super().setUp()
        resources = {}

        class CallbackMemoryResource:
            def __init__(self, allocate_func, deallocate_func):
                self.allocate, self.deallocate = allocate_func, deallocate_func

        class Cuda:
            def __init__(self):
                self.next, self.live = 0x10000, {}

            def allocate(self, size, stream):
                self.next += size
                self.live[self.next - size] = size
                return self.next - size

            def deallocate(self, address, size, stream):
                assert self.live.pop(address) == size

        class Pool:
            """Obtains 4096 bytes from its upstream and hands them out."""

            def __init__(self, upstream):
                self.upstream, self.start, self.used = upstream, upstream.allocate(4096, "stream"), 0

            def allocate(self, size, stream):
                self.used += size
                return self.start + self.used - size

            def deallocate(self, address, size, stream):
                pass

            def release(self):
                self.upstream.deallocate(self.start, 4096, "stream")

        mr = types.ModuleType("rmm.mr")
        mr.CallbackMemoryResource = CallbackMemoryResource
        mr.get_per_device_resource = resources.__getitem__
        mr.set_per_device_resource = resources.__setitem__
        rmm = types.ModuleType("rmm")
        rmm.mr = mr
        self.modules(rmm=rmm, rmm__mr=mr)
        self.resources, self.cuda, self.make_pool = resources, Cuda(), Pool
        resources[0] = self.cuda

    def test_reports_segments_and_blocks_of_a_new_pool(self):
        watched = gpumem.rmm.watch(self.make_pool)
        self.assertEqual(self.agent.segments[1], {0x10000: 4096})
        resource = self.resources[0]
        first, second = resource.allocate(512, "s"), resource.allocate(256, "s")
        self.assertEqual(self.agent.blocks[1], {first: 512, second: 256})
        resource.deallocate(first, 512, "s")
        self.assertEqual(self.agent.blocks[1], {second: 256})
        watched.undo()
        self.assertIs(self.resources[0], self.cuda)
        watched._inner.release()
        self.assertEqual((self.agent.segments[1], self.cuda.live), ({}, {}))

    def test_reports_blocks_of_the_existing_resource(self):
        with gpumem.rmm.watch():
            address = self.resources[0].allocate(512, "s")
            self.assertEqual((self.agent.segments[1], self.agent.blocks[1]), ({address: 512}, {address: 512}))
            self.resources[0].deallocate(address, 512, "s")
            self.assertEqual(self.resources[0].allocate(0, "s") > 0, True)
        self.assertEqual((self.agent.segments[1], self.agent.blocks[1]), ({}, {}))

    def test_out_of_memory_error_propagates(self):
        self.cuda.allocate = mock.Mock(side_effect=MemoryError("of RMM"))
        with gpumem.rmm.watch():
            with self.assertRaises(MemoryError):
                self.resources[0].allocate(512, "s")
        self.assertEqual(self.agent.blocks, {})


class Device:
    def __init__(self, platform="gpu", number=0, stats=None):
        self.platform, self.id, self.local_hardware_id, self.stats = platform, number, number, stats

    def memory_stats(self):
        return self.stats


class Array:
    """An array with one shard; a sharded one has more."""

    def __init__(self, address, size, shape=(2,), dtype="float32", device=None, deleted=False):
        self.deleted, self.dtype, self.shape = deleted, dtype, shape
        self.size, self.address, self.device = size, address, device or Device()

    def is_deleted(self):
        return self.deleted

    @property
    def addressable_shards(self):
        return [types.SimpleNamespace(device=self.device, data=self)]

    def on_device_size_in_bytes(self):
        return self.size

    def unsafe_buffer_pointer(self):
        return self.address


class JAX(Case):
    def setUp(self):
        super().setUp()
        self.live = []
        self.devices = [Device(stats={"bytes_in_use": 300, "pool_bytes": 1000}), Device("cpu")]
        jax = types.ModuleType("jax")
        jax.live_arrays, jax.local_devices = lambda: self.live, lambda: self.devices
        key = lambda name: types.SimpleNamespace(key=name)  # noqa: E731
        jax.tree_util = types.SimpleNamespace(
            tree_flatten_with_path=lambda tree: ([((key(name),), leaf) for name, leaf in tree.items()], None)
        )
        jax.profiler = types.SimpleNamespace(device_memory_profile=lambda: b"\x1f\x8b")
        self.modules(jax=jax)
        gpumem.jax._pools.clear()
        gpumem.jax._seen.clear()

    def test_reports_new_and_freed_arrays(self):
        a, b = Array(0x100, 64), Array(0x200, 128, (4, 8), "bfloat16")
        host, gone = Array(0x300, 64, device=Device("cpu")), Array(0x400, 64, deleted=True)
        self.live = [a, b, host, gone, a]
        self.assertEqual(gpumem.jax.look(), 192)
        self.assertEqual(self.agent.blocks[1], {0x100: 64, 0x200: 128})
        self.assertEqual(self.agent.tags[0x200], ("jax/bfloat16[4,8]", 0))
        self.assertEqual(self.agent.states, {1: (1000, 300)})
        self.live = [b, Array(0x100, 32)]
        self.assertEqual(gpumem.jax.look(), 160)
        self.assertEqual(self.agent.blocks[1], {0x100: 32, 0x200: 128})
        self.live = []
        self.assertEqual(gpumem.jax.look(), 0)
        self.assertEqual((self.agent.blocks[1], self.agent.segments[1]), ({}, {}))

    def test_names_the_arrays_of_a_pytree(self):
        a, b = Array(0x100, 64), Array(0x200, 128)
        self.live = [a, b]
        self.assertEqual(gpumem.jax.name("params", {"w": a, "again": a, "b": b}, role="parameter"), 2)
        self.assertEqual(self.agent.tags, {0x100: ("params/w", 1), 0x200: ("params/b", 1)})
        gpumem.jax.look()
        self.assertEqual(self.agent.tags[0x100], ("params/w", 1), "a later look leaves it")

    def test_array_deleted_during_the_poll_is_skipped(self):
        broken = Array(0x100, 64)
        broken.unsafe_buffer_pointer = mock.Mock(side_effect=RuntimeError("deleted"))
        self.live = [broken, Array(0x200, 8)]
        self.assertEqual(gpumem.jax.look(), 8)

    def test_thread_polls(self):
        self.live = [Array(0x100, 64)]
        seen = threading.Event()
        look = gpumem.jax.look
        with mock.patch.object(gpumem.jax, "look", lambda: (look(), seen.set())):
            gpumem.jax.watch(every=0.001)
            self.assertTrue(seen.wait(10))
            gpumem.jax.unwatch()
        self.assertEqual(self.agent.blocks[1], {0x100: 64})

    def test_polling_continues_after_a_failed_poll(self):
        looks, seen = iter([RuntimeError("deleted"), None]), threading.Event()

        def look():
            error = next(looks, None)
            if error is not None:
                raise error
            seen.set()

        with mock.patch.object(gpumem.jax, "look", look):
            gpumem.jax.watch(every=0.001)
            self.assertTrue(seen.wait(10))
            gpumem.jax.unwatch()


class TensorFlow(unittest.TestCase):
    def test_variable_is_set_unless_another_value_exists(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("TF_GPU_ALLOCATOR", None)
            self.assertTrue(gpumem.tensorflow.use_async_allocator())
            self.assertEqual(os.environ["TF_GPU_ALLOCATOR"], "cuda_malloc_async")
            os.environ["TF_GPU_ALLOCATOR"] = "cuda_malloc"
            self.assertFalse(gpumem.tensorflow.use_async_allocator())
            self.assertEqual(os.environ["TF_GPU_ALLOCATOR"], "cuda_malloc")

    def test_false_if_devices_exist(self):
        with mock.patch.dict(os.environ, TF_GPU_ALLOCATOR=""), mock.patch.dict(sys.modules, tensorflow=mock.Mock()):
            os.environ.pop("TF_GPU_ALLOCATOR")
            self.assertFalse(gpumem.tensorflow.use_async_allocator())


class Alone(unittest.TestCase):
    def test_adapters_import_without_frameworks(self):
        """Each adapter can be imported without its framework, and the package imports no framework."""
        script = (
            "import sys, gpumem, gpumem.cupy, gpumem.rmm, gpumem.jax, gpumem.tensorflow\n"
            "print([name for name in ('cupy', 'rmm', 'jax', 'tensorflow', 'torch', 'numpy', 'IPython') if name in sys.modules])"
        )
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        self.assertEqual((done.stdout, done.stderr), ("[]\n", ""))


if __name__ == "__main__":
    unittest.main()
