#!/usr/bin/env python3
"""Prints the licences of the code in the programs: name, version and licence of every crate, and the licence texts in the crates.

Crates used only by builds, macros or tests are not in the programs, and not in the list.
"""

import pathlib
import sys
from typing import Dict, List

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import crates as of_cargo  # noqa: E402

TEXTS = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")


def main() -> int:
    crates = of_cargo.Crates()
    held = [crates.packages[each] for each in crates.of(list(of_cargo.PROGRAMS.values()))]
    strangers = [package for package in held if package["source"]]
    print("The programs hold these, each under its own licence, and Rust's standard library (MIT OR Apache-2.0). SQLite, in")
    print("libsqlite3-sys, is in the public domain.\n")
    for package in strangers:
        print("{} {}: {}".format(package["name"], package["version"], package["license"] or "see below"))
    texts: Dict[str, List[str]] = {}
    for package in strangers:
        for path in sorted(pathlib.Path(package["manifest_path"]).parent.iterdir()):
            if path.is_file() and path.name.upper().startswith(TEXTS):
                text = path.read_text(encoding="utf-8", errors="replace").strip()
                texts.setdefault(text, []).append("{} {}".format(package["name"], package["version"]))
    for text, owners in texts.items():
        print("\n\n{}\n{}:\n\n{}".format("-" * 100, ", ".join(sorted(set(owners))), text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
