#!/usr/bin/env python3
"""Prints the components of the programs as CycloneDX 1.6 in JSON: every crate with its licence and checksum, SQLite, Rust's
standard library, and the programs with their checksums. The same files give the same bytes.

    sbom.py NAME VERSION gpumemd=FILE gpumemctl=FILE gpumem-mcp=FILE libgpumem.so=FILE [deb:NAME=VERSION ...]

NAME: a package URL such as `pkg:deb/debian/gpumemd` or `pkg:pypi/gpumem`. deb: a Debian package in the image.
"""

import hashlib
import json
import os
import pathlib
import re
import sys
import time
import urllib.parse
import uuid
from typing import Any, Dict, List

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import crates as of_cargo  # noqa: E402

STD = "pkg:generic/rust-std"


def main() -> int:
    purl, version, *files = sys.argv[1:]
    crates = of_cargo.Crates()
    std = "{}@{}".format(STD, crates.compiler("release"))
    components: List[Dict[str, Any]] = []
    needs: Dict[str, List[str]] = {}
    checksums = crates.checksums()
    for each in crates.of(list(of_cargo.PROGRAMS.values())):
        package = crates.packages[each]
        component = crate(package, checksums)
        components.append(component)
        needs[component["bom-ref"]] = [reference(crates.packages[other]) for other in crates.needs[each]]
        if package["name"] == "libsqlite3-sys":
            inside = sqlite(pathlib.Path(package["manifest_path"]).parent)
            components.append(inside)
            needs[component["bom-ref"]].append(inside["bom-ref"])
    components.append(library(std, "std", crates.compiler("release"), "MIT OR Apache-2.0"))
    top = "{}@{}".format(purl, version)
    needs[top] = []
    for name, path in (each.split("=", 1) for each in files):
        if name.startswith("deb:"):
            debian = "pkg:deb/debian/{}@{}".format(name[4:], urllib.parse.quote(path, safe=""))
            components.append({"type": "library", "bom-ref": debian, "name": name[4:], "version": path, "purl": debian})
            needs[top].append(debian)
            continue
        program = "file:" + name
        digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        components.append({"type": "application", "bom-ref": program, "name": name, "version": version, "hashes": hashes(digest)})
        held = [each for each in crates.of([of_cargo.PROGRAMS[name]]) if crates.packages[each]["name"] == of_cargo.PROGRAMS[name]]
        needs[program] = [reference(crates.packages[each]) for each in held] + [std]
        needs[top].append(program)
    metadata: Dict[str, Any] = {
        "component": {
            "type": "application",
            "bom-ref": top,
            "name": purl.rsplit("/", 1)[1],
            "version": version,
            "purl": top,
            "licenses": [{"expression": "Apache-2.0"}],
        }
    }
    if os.environ.get("SOURCE_DATE_EPOCH"):
        when = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))
        metadata["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", when)
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": metadata,
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": sorted(set(needs[ref]))} for ref in sorted(needs)],
    }
    # Named after its contents, so that equal contents have the same name.
    document["serialNumber"] = "urn:uuid:{}".format(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True)))
    json.dump(document, sys.stdout, indent=1, sort_keys=True)
    print()
    return 0


def reference(package: Dict[str, Any]) -> str:
    return "pkg:cargo/{}@{}".format(package["name"], package["version"])


def hashes(digest: str) -> List[Dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


def library(purl: str, name: str, version: str, licence: str) -> Dict[str, Any]:
    component: Dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    component["licenses"] = [{"expression": licence}]
    return component


def crate(package: Dict[str, Any], checksums: Dict[str, str]) -> Dict[str, Any]:
    # Older manifests have a bar for OR.
    licence = re.sub(r" ?/ ?", " OR ", package["license"])
    component = library(reference(package), package["name"], package["version"], licence)
    if package["source"]:
        component["hashes"] = hashes(checksums["{} {}".format(package["name"], package["version"])])
    if package.get("repository"):
        component["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return component


def sqlite(crate_folder: pathlib.Path) -> Dict[str, Any]:
    """Returns the C library that the crate contains and compiles, with the version from its header."""
    header = (crate_folder / "sqlite3" / "sqlite3.h").read_text(encoding="utf-8")
    version = re.search(r'#define SQLITE_VERSION\s+"(.*)"', header)[1]  # type: ignore[index]
    return library("pkg:generic/sqlite@" + version, "sqlite", version, "blessing")


if __name__ == "__main__":
    sys.exit(main())
