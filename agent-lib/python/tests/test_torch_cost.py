"""Cost of ``gpumem.torch``, with a replica of PyTorch and no agent.

python3 -m unittest discover -s agent-lib/python/tests"""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from test_gpumem import run  # noqa: E402

TORCH = """
import sys, threading, time, types
class Module:
    def __init__(self):
        self.__dict__.update(_modules={}, _parameters={}, _buffers={})
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.nn = types.SimpleNamespace(Module=Module)
from gpumem.torch import _modules
modules = _modules.Modules()
class Block(Module): pass
"""


STEPS = (
    TORCH
    + """
from gpumem.torch import _steps
from gpumem.torch._sweep import Sweeper
class Dear(Sweeper):
    def sweep(self, optimizers, gradients):
        self.count += 1
        self.seconds = self.cpu_seconds = 0.3
        self.due, self.version = time.perf_counter() + 60, self.modules.version
    def forget(self): pass
class Optimizer:
    def __init__(self): self.param_groups = [{"params": [object()]}]
def search():
    searches.append(1)
    modules.searches, modules.search_seconds, modules.searched_at = 9, 0.3, time.perf_counter()
modules.search, searches, sweeper = search, [], Dear(modules)
steps = _steps.Steps(modules, sweeper)
before, after = _steps.hooks(steps)
"""
)


class Searches(unittest.TestCase):
    def test_tuples_under_construction_are_not_referenced(self):
        script = (
            TORCH
            + """
ended, failed = threading.Event(), []
def fill():
    while not ended.is_set():
        try:
            tuple(number for number in range(300))
        except SystemError as error:
            failed.append(error)
threads = [threading.Thread(target=fill) for _ in range(3)]
kept = [Block()] + [[number] for number in range(100000)]
sys.setswitchinterval(1e-4)
for thread in threads: thread.start()
for _ in range(10): modules.search()
ended.set()
for thread in threads: thread.join()
print(len(failed), len(modules.known))
"""
        )
        self.assertEqual(run(script), ["0", "1"])

    def test_next_search_waits_after_a_slow_one(self):
        script = TORCH + (
            "modules.searches, modules.search_seconds, modules.searched_at = 1, 1.0, time.perf_counter() - 10\n"
            "print(modules.is_due())\n"
            "modules.search_seconds = 0.001\n"
            "print(modules.is_due())"
        )
        self.assertEqual(run(script), ["False", "True"])


class Roots(unittest.TestCase):
    def test_many_roots_are_numbered_in_linear_time(self):
        """Blocks are roots until their list adopts them: a model may have tens of thousands."""
        script = TORCH + (
            "blocks = [Block() for _ in range(50000)]\n"
            "start = time.perf_counter()\n"
            "for block in blocks: modules.root(block)\n"
            "print(time.perf_counter() - start < 10, modules.known[id(blocks[-1])].number)\n"
            "del block, blocks[3], blocks[1]\n"
            "late = [Block() for _ in range(3)]\n"
            "print(*(modules.root(block).number for block in late))"
        )
        self.assertEqual(run(script), ["True", "50000", "2", "4", "50001"])


class Optimizers(unittest.TestCase):
    def test_sweeps_for_many_new_optimizers_are_limited(self):
        script = STEPS + """
for _ in range(100):
    optimizer = Optimizer()
    before(optimizer, (), {})
    after(optimizer, (), {})
print(1 <= sweeper.count <= 9, 1 <= len(searches) <= 9, len(steps.optimizers()), len(steps.known), len(steps.done))
"""
        self.assertEqual(run(script), ["True", "True", "1", "1", "1"])

    def test_step_without_changes_makes_no_python_calls(self):
        script = STEPS + """
optimizer, called = Optimizer(), []
def step():
    before(optimizer, (), {})
    after(optimizer, (), {})
for _ in range(5): step()
sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
step()
sys.setprofile(None)
print(*[name for name in called if name not in ("step", "_never", "_nothing")], steps.count)
"""
        self.assertEqual(run(script), ["before", "after", "6"])

    def test_forked_child_does_not_scan(self):
        script = STEPS + """
import os
optimizer = Optimizer()
if os.fork() == 0:
    before(optimizer, (), {})
    after(optimizer, (), {})
    os._exit(0 if (sweeper.count, len(steps.known), steps.count) == (0, 0, 0) else 1)
_, status = os.wait()
before(optimizer, (), {})
print(status, len(steps.known))
"""
        self.assertEqual(run(script), ["0", "1"])


class Ticks(unittest.TestCase):
    def test_failed_tick_is_reported_and_retried(self):
        script = TORCH + """
from gpumem.torch import _core
_core.functions.roles = lambda state, reason: told.append(state)
here, told = _core.Core(), []
_core._trains = lambda here: True  # otherwise a pause would trigger a complete scan
here.tested, here.calibrated, _core._core = True, True, here
here.sweeper.changed, here.sweeper.age = lambda: False, lambda: 60
def fails(): raise RuntimeError("dictionary changed size during iteration")
fine = here.sweeper.is_due = lambda: False
print(_core.tick(), *told)
for due in (fails, fine, fails, fails, fails):
    here.sweeper.is_due = due
    print(_core.tick(), told[-1])
"""
        self.assertEqual(run(script), ["0"] + ["0", "2", "0", "1", "0", "2", "0", "2", "2", "2"])


if __name__ == "__main__":
    unittest.main()
