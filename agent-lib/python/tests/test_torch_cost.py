"""What ``gpumem.torch`` costs the program, with a stand-in for PyTorch and no agent.

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


class Searches(unittest.TestCase):
    def test_tuples_that_others_are_filling_are_left_alone(self):
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


if __name__ == "__main__":
    unittest.main()
