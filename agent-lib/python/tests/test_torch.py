"""``gpumem.torch`` without an agent and PyTorch; tests/torch/inside.py tests it with both.

python3 -m unittest discover -s agent-lib/python/tests"""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from test_gpumem import PACKAGE, run  # noqa: E402


class Inert(unittest.TestCase):
    def test_calls_do_nothing_without_an_agent(self):
        script = (
            "import sys\n"
            "import gpumem.torch\n"
            "class Model: pass\n"
            "model = Model()\n"
            "print(gpumem.torch.watch(model), gpumem.torch.watch(model, model, name='a'), gpumem.torch.unwatch(model))\n"
            "print(gpumem.watch(model, name='a'), 'torch' in sys.modules, vars(model))"
        )
        self.assertEqual(run(script), ["None"] * 3 + ["None", "False", "{}"])

    def test_sizes_of_models_keep_no_parameter(self):
        script = (
            "import sys, weakref\n"
            "from types import SimpleNamespace\n"
            "from gpumem.torch._models import Models\n"
            "class Table: sparse = False\n"
            "class Parameter:\n"
            "    requires_grad = is_cuda = True\n"
            "    dtype = 'torch.float32'\n"
            "    numel = element_size = lambda self: 4\n"
            "class Bag: sparse = False\n"
            "sys.modules['torch'] = SimpleNamespace(nn=SimpleNamespace(Embedding=Table, EmbeddingBag=Bag))\n"
            "models, parameter = Models(lambda tensor: [tensor], []), Parameter()\n"
            "models.add('net/table/weight', parameter, Table())\n"
            "models.add('net/bag/weight', Parameter(), Bag())\n"
            "models.send()\n"
            "parameter = weakref.ref(parameter)\n"
            "print(models._bytes['net', 'float32'], parameter())"
        )
        self.assertEqual(" ".join(run(script)), "[32, 32, 0, 16, 0] None")

    def test_embedded_sources_match_the_package(self):
        carried = (PACKAGE.parent / "src/sources/python_host/bootstrap.rs").read_text()
        for path in (PACKAGE / "gpumem/torch").glob("_*.py"):
            if path.name != "__init__.py":
                self.assertIn("gpumem/torch/%s\"" % path.name, carried)


if __name__ == "__main__":
    unittest.main()
