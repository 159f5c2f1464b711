"""The agent on the simulated GPU: names, live memory, peaks, late attach, recordings."""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import unittest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PACKAGE), str(PACKAGE / "tests")]

import gpumem  # noqa: E402
from simulated import DRIVER  # noqa: E402

HAS_AGENT = os.environ.get("GPUMEM_TEST_AGENT") == "1"
MIB = 1 << 20

def run(script, **environment):
    """Runs a script in a new Python process after the driver code above; returns its output as parsed JSON lines."""
    clean = {name: value for name, value in os.environ.items() if name not in environment}
    clean.update({name: value for name, value in environment.items() if value is not None})
    clean.update(PYTHONPATH=str(PACKAGE), PYTHONDONTWRITEBYTECODE="1")
    text = "import json\n" + DRIVER + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], env=clean, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


@unittest.skipUnless(HAS_AGENT, "GPUMEM_TEST_AGENT is not set")
class Live(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scope = {}
        exec(DRIVER, scope)
        cls.take, cls.give, cls.begin = (staticmethod(scope[name]) for name in ("take", "give", "begin"))
        scope["begin"]()
        assert gpumem.available()

    def setUp(self):
        self.held = []

    def tearDown(self):
        for address in self.held:
            self.give(address)

    def hold(self, size):
        self.held.append(self.take(size))
        return self.held[-1]

    def device(self):
        found = gpumem.snapshot()
        self.assertEqual((found["schema"], found["pid"]), (1, os.getpid()))
        device = next(device for device in found["devices"] if device["ordinal"] == 0)
        parts = ["direct_bytes", "block_bytes", "pool_idle_bytes", "opaque_bytes"]
        self.assertEqual(sum(device[part] for part in parts), device["tracked_bytes"] + device["unseen_bytes"])
        for of, part in [("direct", "direct_bytes"), ("blocks", "block_bytes")]:
            self.assertEqual(sum(tag["bytes"] for tag in device["tags"] if tag["of"] == of), device[part])
        self.assertEqual(sum(device["roles"].values()), device["direct_bytes"] + device["block_bytes"])
        return device

    def tags(self, of="direct"):
        tags = {}
        for tag in self.device()["tags"]:
            if tag["of"] == of:
                tags[tag["path"]] = tags.get(tag["path"], 0) + tag["bytes"]
        return tags

    def test_scopes_name_allocations(self):
        with gpumem.scope("model"):
            self.hold(MIB)
            with gpumem.scope("layer"):
                self.hold(2 * MIB)
            self.hold(4 * MIB)
        tags = self.tags()
        self.assertEqual((tags["model"], tags["model/layer"]), (5 * MIB, 2 * MIB))

    def test_unusual_names_are_kept(self):
        for name in ['a "quoted" \\ name', "line\nbreak\ttab\x01", "ünï ☃ 𝔾", "x" * 300]:
            with gpumem.scope(name):
                self.hold(MIB)
            self.assertEqual(self.tags()[name[:255]], MIB)

    def test_scopes_of_the_library_and_of_python_nest(self):
        library = ctypes.CDLL(os.environ["CUDA_INJECTION64_PATH"])
        with gpumem.scope("python"):
            library.gpumem_push(b"c")
            with gpumem.scope("again"):
                self.hold(MIB)
            library.gpumem_pop()
            self.hold(2 * MIB)
        tags = self.tags()
        self.assertEqual((tags["python/c/again"], tags["python"]), (MIB, 2 * MIB))

    def test_blocks_and_idle_pool_memory(self):
        before = self.device()
        with gpumem.scope("segment"):
            start = self.hold(8 * MIB)
        pool = gpumem.Pool("own")
        pool.add_segment(start, 8 * MIB)
        device = self.device()
        self.assertEqual(device["opaque_bytes"] - before["opaque_bytes"], 8 * MIB)
        with gpumem.scope("x"):
            pool.add_block(start, MIB)
            pool.add_block(start + MIB, MIB)
        pool.free_block(start + MIB, pending=True)
        pool.retag(start, "known", gpumem._say.ROLES["gradient"])
        device = self.device()
        ours = next(each for each in device["pools"] if each["name"] == "own")
        figures = [ours[key] for key in ("segments", "segment_bytes", "blocks", "block_bytes", "pending_bytes", "idle_bytes")]
        self.assertEqual(figures, [1, 8 * MIB, 2, 2 * MIB, MIB, 6 * MIB])
        self.assertEqual(self.tags("blocks")["known"], MIB)
        self.assertEqual(device["roles"]["gradient"], MIB)
        self.assertEqual(device["opaque_bytes"], before["opaque_bytes"])
        pool.destroy()
        self.assertEqual(self.tags()["segment"], 8 * MIB)

    def test_nested_pools_count_at_the_innermost(self):
        start = self.hold(8 * MIB)
        outer = gpumem.Pool("outer")
        outer.add_segment(start, 8 * MIB)
        with gpumem.scope("of outer"):
            outer.add_block(start, 4 * MIB)
        inner = gpumem.Pool("inner", parent=outer)
        inner.add_segment(start, 3 * MIB)
        with gpumem.scope("of inner"):
            inner.add_block(start, MIB)
        tags = self.tags("blocks")
        self.assertEqual((tags["of outer"], tags["of inner"]), (MIB, MIB))
        device = self.device()
        self.assertEqual(device["pool_idle_bytes"], 6 * MIB)
        inner.destroy()
        outer.destroy()

    def test_retag(self):
        with gpumem.scope("early"):
            addresses = [self.hold(MIB), self.hold(MIB)]

        class Array:
            __cuda_array_interface__ = {"data": (addresses[1], False)}

        self.assertEqual(gpumem.retag({"a": addresses[0], "b": [Array(), Array(), None, "text"]}, "late", "parameter"), 2)
        device = self.device()
        tags = [tag for tag in device["tags"] if tag["path"] == "late"]
        self.assertEqual([(tag["role"], tag["bytes"], tag["count"]) for tag in tags], [("parameter", 2 * MIB, 2)])

    def test_peak_of_a_range(self):
        with gpumem.scope("base"):
            self.hold(MIB)
        begun = self.device()["tracked_bytes"]
        with gpumem.peak() as outer:
            with gpumem.scope("high"):
                address = self.take(16 * MIB)
            self.give(address)
            with gpumem.peak() as inner:
                with gpumem.scope("low"):
                    address = self.take(2 * MIB)
                self.assertEqual(inner.bytes, begun + 2 * MIB, "while it is open")
                self.give(address)
            with gpumem.peak() as nothing:
                pass
        self.assertEqual(outer.start_bytes, begun)
        self.assertEqual([outer.bytes, inner.bytes, nothing.bytes], [begun + 16 * MIB, begun + 2 * MIB, begun])
        self.assertEqual((outer.composition["high"], outer.composition["base"]), (16 * MIB, MIB))
        self.assertEqual(sum(outer.composition.values()), outer.bytes)
        self.assertNotIn("high", inner.composition)
        self.assertEqual(inner.composition["low"], 2 * MIB)
        with gpumem.peak() as later:
            pass
        self.assertEqual(later.bytes, begun, "nothing is left of the ranges before")

    def test_peak_counts_retags_and_blocks(self):
        start = self.hold(8 * MIB)
        pool = gpumem.Pool("p")
        pool.add_segment(start, 8 * MIB)
        pool.add_block(start, MIB)
        with gpumem.peak() as p:
            with gpumem.scope("x"):
                pool.add_block(start + MIB, MIB)
            pool.retag(start + MIB, "y")
            pool.free_block(start)
            pool.add_block(start, MIB // 2)
        self.assertEqual((p.start_block_bytes, p.block_bytes), (MIB, 2 * MIB))
        self.assertEqual(p.composition, {"": MIB, "y": MIB})
        pool.destroy()

    def test_peaks_of_overlapping_ranges(self):
        first, second = gpumem.peak(), gpumem.peak(device=0)
        begun = self.device()["tracked_bytes"]
        first.__enter__()
        self.give(self.take(4 * MIB))
        second.__enter__()
        self.give(self.take(2 * MIB))
        first.close()
        self.give(self.take(8 * MIB))
        second.close()
        self.assertEqual((first.bytes - begun, second.bytes - begun), (4 * MIB, 8 * MIB))
        with gpumem.peak(device=7) as elsewhere:
            self.give(self.take(MIB))
        self.assertEqual(elsewhere.bytes, 0)

    def test_peak_with_threads(self):
        import threading

        with gpumem.peak() as p:
            base = p.bytes
            barrier = threading.Barrier(4)

            def work(name):
                self.begin()
                with gpumem.scope(name):
                    for _ in range(50):
                        address = self.take(MIB)
                        self.give(address)
                    address = self.take(MIB)
                    barrier.wait(30)  # all of them hold one
                    barrier.wait(30)
                    self.give(address)

            threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(p.bytes, base + 4 * MIB)
        self.assertEqual(sum(p.composition.values()), p.bytes)

    def test_status(self):
        gpumem.scope("any").__enter__().__exit__(None, None, None)
        how = gpumem.status()
        self.assertTrue(how["available"])
        self.assertIn(how["state"], ("covered", "late"), "late: another test has paused it")
        self.assertEqual(how["said"][0]["state"], "covered")
        layers = {layer["layer"]: layer["state"] for layer in how["layers"]}
        self.assertEqual(layers["scopes"], "active")
        self.assertEqual((how["connected"], how["lost"]), (False, 0))


@unittest.skipUnless(HAS_AGENT, "GPUMEM_TEST_AGENT is not set")
class Ways(unittest.TestCase):
    """Loading the wheel's agent before and after CUDA is initialised."""

    LIBRARY = os.environ.get("CUDA_INJECTION64_PATH", "")

    def test_import_before_cuda_begins(self):
        said = run(
            """
            import gpumem, os
            print(json.dumps(gpumem.status()["state"]))
            with gpumem.scope("early"):
                begin()
                take(1 << 20)
            device = gpumem.snapshot()["devices"][0]
            print(json.dumps([gpumem.status()["state"], device["tags"][0]["path"], os.environ["NVTX_INJECTION64_PATH"]]))
            """,
            CUDA_INJECTION64_PATH=None,
            NVTX_INJECTION64_PATH=None,
            GPUMEM_LIBRARY=self.LIBRARY,
        )
        self.assertEqual(said, ["waiting", ["covered", "early", self.LIBRARY]])

    def test_import_after_the_first_allocation_is_late(self):
        said = run(
            """
            begin()
            take(1 << 20)
            import gpumem
            how = gpumem.status()
            take(2 << 20)
            print(json.dumps([how["state"], how["detail"], gpumem.snapshot()["devices"][0]["tracked_bytes"], gpumem.status()["missed"]]))
            """,
            CUDA_INJECTION64_PATH=None,
            GPUMEM_LIBRARY=self.LIBRARY,
        )[0]
        self.assertEqual(said[0], "late")
        self.assertEqual(said[2:], [2 * MIB, [{"ordinal": 0, "bytes": None}]], "unknown is not zero")

    def test_other_injection_library_is_loaded_first(self):
        said = run(
            """
            import gpumem, os
            print(json.dumps([os.environ["CUDA_INJECTION64_PATH"], os.environ["GPUMEM_NEXT_INJECTION64_PATH"]]))
            begin()
            print(json.dumps(gpumem.status()["state"]))
            """,
            CUDA_INJECTION64_PATH="/nonexistent/libtool.so",
            GPUMEM_LIBRARY=self.LIBRARY,
        )
        self.assertEqual(said, [[self.LIBRARY, "/nonexistent/libtool.so"], "covered"])

    def test_disabled(self):
        said = run(
            """
            import gpumem, os
            begin()
            print(json.dumps([gpumem.available(), "CUDA_INJECTION64_PATH" in os.environ]))
            """,
            CUDA_INJECTION64_PATH=None,
            GPUMEM_LIBRARY=self.LIBRARY,
            GPUMEM_DISABLE="1",
        )
        self.assertEqual(said, [[False, False]])

    def test_pool_created_before_cuda_is_initialised(self):
        said = run(
            """
            import gpumem
            pool = gpumem.Pool("early")
            begin()
            start = take(1 << 20)
            pool.add_segment(start, 1 << 20)
            pool.add_block(start, 1 << 19)
            device = gpumem.snapshot()["devices"][0]
            pool.destroy()
            pool.add_block(start, 1 << 19)
            print(json.dumps([device["uuid"][:4], device["pools"][0]["block_bytes"], gpumem.snapshot()["devices"][0]["pools"]]))
            """
        )
        self.assertEqual(said, [["GPU-", MIB // 2, []]])

    def test_a_forked_child_and_its_scopes(self):
        said = run(
            """
            import gpumem, os
            begin()
            with gpumem.scope("parent"):
                child = os.fork()
                if child == 0:
                    ok = not gpumem.available() and gpumem.snapshot() is None
                    with gpumem.scope("child"), gpumem.peak() as p:
                        ok = ok and p.bytes is None
                    os._exit(0 if ok else 1)
                status = os.waitpid(child, 0)[1]
                take(1 << 20)
            print(json.dumps([status, gpumem.snapshot()["devices"][0]["tags"][0]["path"]]))
            """
        )
        self.assertEqual(said, [[0, "parent"]])

    def test_child_that_initialises_cuda_itself(self):
        said = run(
            """
            import gpumem, os, sys
            with gpumem.scope("outer"):
                child = os.fork()
                if child == 0:
                    begin()
                    for _ in range(2000):
                        with gpumem.scope("inner"):
                            pass
                    with gpumem.scope("inner"):
                        take(1 << 20)
                    print(json.dumps(gpumem.snapshot()["devices"][0]["tags"][0]["path"]))
                    sys.stdout.flush()
                    os._exit(0)
                os.waitpid(child, 0)
            """
        )
        self.assertEqual(said, ["outer/inner"])


@unittest.skipUnless(HAS_AGENT, "GPUMEM_TEST_AGENT is not set")
class Recordings(unittest.TestCase):
    def test_a_recording_of_a_range(self):
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.gpumem")
            said = run(
                """
                import gpumem, sys
                begin()
                with gpumem.record({!r}) as begun:
                    with gpumem.step(5), gpumem.phase("forward"), gpumem.muted():
                        gpumem.mark("here")
                        gpumem.counter("batch", 8)
                        gpumem.count("batch")
                        take(1 << 20)
                print(json.dumps([begun, gpumem.configure("no such key", 1), gpumem.stop()]))
                """.format(path)
            )
            self.assertEqual(said, [[True, False, True]])
            self.assertGreater(os.path.getsize(path), 100)

    def test_a_window_of_steps(self):
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x.gpumem")
            said = run(
                """
                import gpumem, os
                path = {!r}
                begin()
                asked = [gpumem.configure("record_steps", value) for value in ("3:4", "4:3", "x")]
                sizes = [gpumem.start(path)]
                for number in range(7):
                    with gpumem.step(number):
                        take(1 << 20)
                        sizes.append(os.path.getsize(path))
                asked.append(gpumem.configure("record_max_size", "1000"))
                asked.append(gpumem.start(path + ".2"))
                print(json.dumps([asked, sizes]))
                """.format(path)
            )
            asked, sizes = said[0]
            self.assertEqual(asked, [True, False, False, True, True])
            before, within, after = sizes[1:4], sizes[4:6], sizes[6:]
            self.assertEqual(len(set(before)), 1, "its head, and nothing of the steps before")
            self.assertGreater(within[0], before[0])
            self.assertEqual(len(set(after)), 1, "nothing of the steps after")
            self.assertEqual(os.listdir(folder), ["x.gpumem"])


if __name__ == "__main__":
    unittest.main()
