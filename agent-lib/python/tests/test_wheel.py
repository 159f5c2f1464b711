"""build_wheel.py with placeholder programs: the wheel's contents, its tag, and reproducibility."""

import csv
import hashlib
import io
import os
import pathlib
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PACKAGE))

import build_wheel  # noqa: E402


class Wheel(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.out = pathlib.Path(self.folder.name)
        program = pathlib.Path(os.path.realpath("/bin/sh"))
        self.files = dict.fromkeys([*build_wheel.PROGRAMS, build_wheel.LIBRARY], program)

    def test_build_is_reproducible(self):
        first = build_wheel.wheel(self.files, self.out / "a", b"{}")
        with mock.patch("time.time", return_value=2e9):
            second = build_wheel.wheel(self.files, self.out / "b", b"{}")
        self.assertEqual(first.name, second.name)
        self.assertEqual(first.read_bytes(), second.read_bytes())

    def test_wheel_contents(self):
        with zipfile.ZipFile(build_wheel.wheel(self.files, self.out, b"{}")) as wheel:
            names = wheel.namelist()
            for name in [
                "gpumem/__init__.py",
                "gpumem/py.typed",
                "gpumem/libgpumem.so",
                "gpumem-0.1.0.data/data/lib/gpumem/0.1.0/libgpumem.so",
                "gpumem-0.1.0.data/scripts/gpumemctl",
                "gpumem-0.1.0.data/scripts/gpumemd",
                "gpumem-0.1.0.dist-info/METADATA",
                "gpumem-0.1.0.dist-info/licenses/LICENSE",
            ]:
                self.assertIn(name, names)
            self.assertFalse([name for name in names if "__pycache__" in name or name.startswith("tests")])
            modes = {info.filename: info.external_attr >> 16 & 0o777 for info in wheel.infolist()}
            self.assertEqual(modes["gpumem-0.1.0.data/scripts/gpumemd"], 0o755)
            record = list(csv.reader(io.StringIO(wheel.read("gpumem-0.1.0.dist-info/RECORD").decode())))
            self.assertEqual(sorted(line[0] for line in record), sorted(names))
            for name, digest, size in record[:-1]:
                data = wheel.read(name)
                self.assertEqual((digest, int(size)), ("sha256=" + build_wheel.digest(data), len(data)))
                self.assertEqual(len(hashlib.sha256(data).digest()), 32)

    def test_tag_matches_the_required_glibc(self):
        with mock.patch.object(build_wheel, "glibc", side_effect=[(2, 17), (2, 5), (2, 12)]):
            self.assertTrue(build_wheel.tag(self.files).startswith("manylinux_2_17_"))
        with mock.patch.object(build_wheel, "glibc", side_effect=[(2, 17), (2, 34), (2, 5)]):
            self.assertTrue(build_wheel.tag(self.files).startswith("manylinux_2_34_"))
        major, minor = build_wheel.glibc(self.files["gpumemd"])
        self.assertTrue(major == 2 and 2 <= minor < 100, (major, minor))
        with self.assertRaises(SystemExit):
            build_wheel.glibc(pathlib.Path(__file__))


if __name__ == "__main__":
    unittest.main()
