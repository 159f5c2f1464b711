#!/usr/bin/env python3
"""Prints whose code the programs hold: name, version and licence of every crate in them, and the texts that the crates come with.

What only builds or tests them, macros too, is not in the programs and not in the list.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Dict, List, Set

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ("gpumemd", "gpumemctl", "gpumem-agent")
TEXTS = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")


def main() -> int:
    cargo = os.environ.get("CARGO", "cargo")
    command = [cargo, "metadata", "--format-version", "1", "--locked", "--offline"]
    host = subprocess.run([cargo, "-vV"], check=True, capture_output=True, text=True).stdout
    command += ["--filter-platform", next(line[6:] for line in host.splitlines() if line.startswith("host: "))]
    known = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
    packages = {package["id"]: package for package in known["packages"]}
    nodes = {node["id"]: node for node in known["resolve"]["nodes"]}
    held: Set[str] = set()
    waiting = [each["id"] for each in known["packages"] if each["name"] in PROGRAMS and each["source"] is None]
    while waiting:
        node = waiting.pop()
        if node in held or any("proc-macro" in target["kind"] for target in packages[node]["targets"]):
            continue
        held.add(node)
        for dependency in nodes[node]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                waiting.append(dependency["pkg"])
    strangers = [packages[each] for each in held if packages[each]["source"]]
    strangers.sort(key=lambda each: (each["name"], each["version"]))
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
