"""Lists the crates in the programs, from cargo. Crates used only by builds, macros or tests are left out."""

import json
import os
import pathlib
import re
import subprocess
from typing import Any, Dict, List, Set

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = {"gpumemd": "gpumemd", "gpumemctl": "gpumemctl", "gpumem-mcp": "gpumem-mcp", "libgpumem.so": "gpumem-agent"}


class Crates:
    """Packages by id, and the ids of their dependencies, without dependencies of tests and builds."""

    def __init__(self) -> None:
        self.cargo = os.environ.get("CARGO", "cargo")
        command = [self.cargo, "metadata", "--format-version", "1", "--locked", "--offline"]
        command += ["--filter-platform", self.compiler("host")]
        known = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
        self.packages: Dict[str, Any] = {package["id"]: package for package in known["packages"]}
        self.needs: Dict[str, List[str]] = {}
        for node in known["resolve"]["nodes"]:
            linked = [each["pkg"] for each in node["deps"] if any(kind["kind"] is None for kind in each["dep_kinds"])]
            self.needs[node["id"]] = sorted(each for each in linked if not self.is_macro(each))

    def compiler(self, word: str) -> str:
        """Returns a property of the compiler: host or release."""
        said = subprocess.run([self.cargo, "-vV"], check=True, capture_output=True, text=True).stdout
        return next(line.split(": ", 1)[1] for line in said.splitlines() if line.startswith(word + ": "))

    def is_macro(self, package: str) -> bool:
        return any("proc-macro" in target["kind"] for target in self.packages[package]["targets"])

    def of(self, names: List[str]) -> List[str]:
        """Returns the named crates of the workspace and all crates linked into them, by name and version."""
        held: Set[str] = set()
        waiting = [each for each, package in self.packages.items() if package["name"] in names and not package["source"]]
        while waiting:
            package = waiting.pop()
            if package not in held:
                held.add(package)
                waiting.extend(self.needs[package])
        return sorted(held, key=lambda each: (self.packages[each]["name"], self.packages[each]["version"]))

    def checksums(self) -> Dict[str, str]:
        """Returns the SHA-256 of each crate's file from Cargo.lock, by `name version`."""
        lock = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
        entry = r'name = "(.*)"\nversion = "(.*)"\nsource = ".*"\nchecksum = "(.*)"'
        return {"{} {}".format(name, version): checksum for name, version, checksum in re.findall(entry, lock)}
