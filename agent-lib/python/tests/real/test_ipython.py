"""%load_ext gpumem in a real IPython on the simulated GPU: python3 test_ipython.py, with $GPUMEM_LIBRARY and libcuda.

CUDA is initialised before the extension is loaded, as in most notebooks.
"""

import contextlib
import io
import os
import pathlib
import sys
import unittest

TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from IPython.core.interactiveshell import InteractiveShell  # noqa: E402
from simulated import DRIVER  # noqa: E402


class Notebook(unittest.TestCase):
    def setUp(self):
        self.shell = InteractiveShell.instance()

    def cell(self, text):
        """Runs it and returns the output."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            result = self.shell.run_cell(text)
        if result.error_before_exec:
            raise result.error_before_exec
        return out.getvalue()

    def test_notebook_prints_one_line_for_each_cell(self):
        os.environ.pop("CUDA_INJECTION64_PATH", None)
        self.cell(DRIVER)
        self.cell("begin(); early = take(1 << 20)")
        said = self.cell("%load_ext gpumem")
        self.assertIn("gpumem: late: CUDA was initialised before gpumem was loaded; an unknown amount was allocated earlier", said)
        self.assertEqual(
            self.cell("import gpumem\nwith gpumem.scope('cell'): a = take(2 << 20)\ngive(take(4 << 20))"),
            "gpumem: allocations 2.0 MiB (+2.0 MiB), peak 6.0 MiB\n",
        )
        self.assertEqual(self.cell("x = 1"), "gpumem: allocations 2.0 MiB (+0.0 MiB), peak 2.0 MiB\n")
        said = self.cell("give(a)\nraise ValueError('of the cell')")
        self.assertIn("gpumem: allocations 0.0 MiB (-2.0 MiB), peak 2.0 MiB\n", said)
        self.assertEqual(self.cell("print(gpumem.last_oom())"), "None\n")
        self.cell("before = %gpumem")
        self.assertEqual(self.cell("print(before['devices'][0]['tracked_bytes'])"), "0\n")
        self.cell("%unload_ext gpumem")
        self.assertEqual(self.cell("b = take(1 << 20)"), "")


if __name__ == "__main__":
    unittest.main()
