"""python3 -m unittest discover -s agent-lib/python/tests

$GPUMEM_TEST_AGENT=1: libcuda, libcupti and the agent of $CUDA_INJECTION64_PATH are there (the simulated ones will do);
else the tests that need them are left out."""

import ctypes
import os
import pathlib
import subprocess
import sys
import threading
import unittest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PACKAGE))

import gpumem  # noqa: E402
from gpumem import _library  # noqa: E402

HAS_AGENT = os.environ.get("GPUMEM_TEST_AGENT") == "1"


def run(script, **environment):
    """Runs a script in a new Python process and returns its output."""
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_INJECTION64_PATH"}
    clean.update(environment, PYTHONPATH=str(PACKAGE), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout.split()


class Inert(unittest.TestCase):
    """Without an agent."""

    EVERYTHING = (
        "import gpumem\n"
        "gpumem.pause(); gpumem.resume(); gpumem.resume()\n"
        "with gpumem.paused(): pass\n"
        "print(gpumem.available())"
    )

    def test_calls_do_nothing_without_an_agent(self):
        self.assertEqual(run(self.EVERYTHING), ["False"])

    def test_other_injection_library_is_not_an_agent(self):
        for path in ["/nonexistent/libgpumem.so", "/usr/lib/libother.so", "", __file__]:
            self.assertEqual(run(self.EVERYTHING, CUDA_INJECTION64_PATH=path), ["False"], path)

    def test_lookup_is_repeated_when_the_environment_changes(self):
        script = (
            "import gpumem, os\n"
            "from gpumem import _library\n"
            "looks = []\n"
            "_library._find = lambda path: looks.append(path)\n"
            "for path in ['a', 'a', 'b', 'b']:\n"
            "    os.environ['CUDA_INJECTION64_PATH'] = path\n"
            "    gpumem.available()\n"
            "print(*looks)"
        )
        self.assertEqual(run(script), ["a", "b"])


class Manager(unittest.TestCase):
    """paused(), with an agent that records its calls."""

    def setUp(self):
        self.told = told = []

        class Recorder:
            def available(self):
                return 1

            def pause(self):
                told.append("pause")

            def resume(self):
                told.append("resume")

        self.before = _library._found
        _library._found = Recorder()

    def tearDown(self):
        _library._found = self.before

    def test_pauses_inside(self):
        with gpumem.paused():
            self.assertEqual(self.told, ["pause"])
        self.assertEqual(self.told, ["pause", "resume"])

    def test_resumes_after_an_exception(self):
        with self.assertRaises(KeyError):
            with gpumem.paused():
                raise KeyError("of the program")
        self.assertEqual(self.told, ["pause", "resume"])

    def test_decorates(self):
        @gpumem.paused()
        def profiled(number):
            self.assertEqual(self.told[-1], "pause")
            return number + 1

        self.assertEqual([profiled(1), profiled(2)], [2, 3])
        self.assertEqual(self.told, ["pause", "resume"] * 2)


class Names(unittest.TestCase):
    def test_version_matches_the_package(self):
        text = (PACKAGE / "pyproject.toml").read_text(encoding="utf-8")
        self.assertIn('version = "{}"'.format(gpumem.__version__), text)

    def test_every_public_name_is_documented(self):
        for name in gpumem.__all__:
            self.assertTrue(getattr(gpumem, name).__doc__, name)
            self.assertIn(name + "(", gpumem.__doc__)


@unittest.skipUnless(HAS_AGENT, "GPUMEM_TEST_AGENT is not set")
class Agent(unittest.TestCase):
    """With the agent in this process and another CUPTI client."""

    TAKEN = 39
    CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)

    @classmethod
    def setUpClass(cls):
        with gpumem.paused():  # before CUDA begins
            cls.assertTrue(cls(), gpumem.available())
        cls.cuda = ctypes.CDLL("libcuda.so.1")
        cls.cupti = ctypes.CDLL("libcupti.so.12")
        assert cls.cuda.cuInit(0) == 0
        cls.callback = cls.CALLBACK(lambda *_: None)

    def subscribe(self):
        """Subscribes as another client, and unsubscribes at once."""
        handle = ctypes.c_void_p()
        result = self.cupti.cuptiSubscribe(ctypes.byref(handle), self.callback, None)
        if result == 0:
            self.assertEqual(self.cupti.cuptiUnsubscribe(handle), 0)
        return result

    def test_the_subscription_is_free_inside_only(self):
        self.assertEqual(self.subscribe(), self.TAKEN)
        with gpumem.paused():
            self.assertEqual(self.subscribe(), 0)
            with gpumem.paused():
                self.assertEqual(self.subscribe(), 0)
            self.assertEqual(self.subscribe(), 0)
        self.assertEqual(self.subscribe(), self.TAKEN)

    def test_from_many_threads(self):
        def work():
            for _ in range(20):
                with gpumem.paused():
                    pass

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.subscribe(), self.TAKEN)

    def test_a_forked_child_is_left_alone(self):
        child = os.fork()
        if child == 0:
            with gpumem.paused():
                os._exit(0 if not gpumem.available() else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(self.subscribe(), self.TAKEN)


if __name__ == "__main__":
    unittest.main()
