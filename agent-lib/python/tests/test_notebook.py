"""%load_ext gpumem in a shell with IPython's interface; real/test_ipython.py uses the real one."""

import contextlib
import io
import os
import pathlib
import sys
import unittest
from unittest import mock

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PACKAGE))

import gpumem  # noqa: E402
from gpumem import _notebook  # noqa: E402

HAS_AGENT = os.environ.get("GPUMEM_TEST_AGENT") == "1"


class Shell:
    def __init__(self):
        self.callbacks, self.magics, self.events = {}, {}, self

    def register(self, event, function):
        self.callbacks.setdefault(event, []).append(function)

    def unregister(self, event, function):
        self.callbacks[event].remove(function)

    def register_magic_function(self, function, kind, name):
        self.magics[name] = (kind, function)

    def run(self, cell=lambda: None):
        """Runs a cell and returns its output."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            for function in self.callbacks.get("pre_run_cell", []):
                function(None)
            cell()
            for function in self.callbacks.get("post_run_cell", []):
                function(None)
        return out.getvalue()


class Notebook(unittest.TestCase):
    def setUp(self):
        self.shell = Shell()
        self.addCleanup(gpumem.unload_ipython_extension, self.shell)

    def test_without_an_agent(self):
        said = io.StringIO()
        absent = mock.patch.multiple(_notebook, available=lambda: False, status=lambda: {"available": False, "state": "absent"})
        with contextlib.redirect_stderr(said), absent:
            gpumem.load_ipython_extension(self.shell)
            gpumem.load_ipython_extension(self.shell)
            self.assertEqual(self.shell.run(), "")
        self.assertEqual(said.getvalue().count("no agent in this process"), 1)
        self.assertEqual(len(self.shell.callbacks["pre_run_cell"]), 1)
        gpumem.unload_ipython_extension(self.shell)
        self.assertEqual(self.shell.callbacks, {"pre_run_cell": [], "post_run_cell": []})

    def test_late_agent_is_reported_once_with_missed_bytes(self):
        late = {"available": True, "state": "late", "missed": [{"ordinal": 0, "bytes": 3 << 20}]}
        with mock.patch.object(_notebook, "status", lambda: late), mock.patch.object(_notebook, "available", lambda: True):
            cells = _notebook.Cells()
            self.assertEqual(
                cells.line(),
                "gpumem: late: CUDA was initialised before gpumem was loaded; 3.0 MiB was allocated earlier and has no name",
            )
            self.assertIsNone(cells.line())
        lines = [({"bytes": None, "at_least_bytes": 2 << 20}, "at least 2.0 MiB"), ({"bytes": None}, "unknown")]
        for line, expected in lines:
            self.assertIn(expected, _notebook._missed([line]))

    @unittest.skipUnless(HAS_AGENT, "GPUMEM_TEST_AGENT is not set")
    def test_a_line_per_cell(self):
        from simulated import DRIVER

        MIB = 1 << 20

        driver = {}
        exec(DRIVER, driver)
        driver["begin"]()
        gpumem.load_ipython_extension(self.shell)
        before = sum(device["direct_bytes"] for device in gpumem.snapshot()["devices"])
        held = []

        def cell():
            driver["give"](driver["take"](8 * MIB))
            with gpumem.scope("cell"):
                held.append(driver["take"](2 * MIB))

        said = self.shell.run(cell)
        figures = "allocations {} (+2.0 MiB), peak {}".format(
            _notebook.amount(before + 2 * MIB), _notebook.amount(before + 8 * MIB)
        )
        self.assertEqual(said, "gpumem: {}\n".format(figures))
        last = self.shell.magics["gpumem"][1]("last")
        self.assertEqual((last["change_bytes"], last["peak_bytes"]), (2 * MIB, before + 8 * MIB))
        said = self.shell.run(lambda: driver["give"](held.pop()))
        self.assertIn("(-2.0 MiB)", said) if before else self.assertIn(", peak 2.0 MiB", said)
        self.shell.magics["gpumem"][1]("off")
        self.assertEqual(self.shell.run(cell), "")
        driver["give"](held.pop())
        self.shell.magics["gpumem"][1]("on")
        self.assertIsNotNone(self.shell.magics["gpumem"][1](""))
        with self.assertRaises(KeyError):
            self.shell.run(lambda: {}["a cell that raises is not seen to end"])
        self.shell.run()
        from gpumem import _peak

        self.assertEqual(_peak._open, [], "no range is left open")


if __name__ == "__main__":
    unittest.main()
