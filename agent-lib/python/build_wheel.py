#!/usr/bin/env python3
"""Builds the wheel: the package, the agent and the programs, so that ``pip install`` without root installs everything.

    build_wheel.py [--out FOLDER] [--programs FOLDER] [--profile NAME] [--no-strip]
    build_wheel.py --programs-only [--profile NAME]

Without ``--programs`` gpumemd, gpumemctl, gpumem-mcp and libgpumem.so are first built for old systems (wheel/old_glibc.c), which
needs cargo and a C compiler. With it, the given files are used unchanged. The wheel's tag states the glibc version that
the files require. The same files give the same wheel, byte for byte.

    gpumem/...                                the package, with libgpumem.so
    gpumem-V.data/scripts/gpumemd, gpumemctl, gpumem-mcp  on PATH
        gpumem-V.data/data/lib/gpumem/V/libgpumem.so  where gpumemctl finds it: ../lib/gpumem/V
        gpumem-V.dist-info/sboms/gpumem.cdx.json      list of components
"""

import argparse
import base64
import hashlib
import os
import pathlib
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import Dict, List, Tuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROGRAMS = ("gpumemd", "gpumemctl", "gpumem-mcp")
LIBRARY = "libgpumem.so"

#: Highest glibc version that programs built here may require.
OLDEST = (2, 17)

#: Weak symbols of the standard library, which works without them.
OPTIONAL = (
    "__cxa_thread_atexit_impl",
    "getrandom",
    "gettid",
    "posix_spawn_file_actions_addchdir_np",
    "statx",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "target" / "wheel")
    parser.add_argument("--programs", type=pathlib.Path, help="taken from here instead of built")
    parser.add_argument("--profile", default="release", help="cargo profile of the build")
    parser.add_argument("--no-strip", action="store_true", help="keep symbols")
    parser.add_argument("--programs-only", action="store_true", help="build the programs and exit")
    given = parser.parse_args()
    if given.programs_only:
        build(given.profile)
        return 0
    folder = given.programs or build(given.profile)
    with tempfile.TemporaryDirectory() as scratch:
        files = {name: folder / name for name in (*PROGRAMS, LIBRARY)}
        if not given.no_strip and shutil.which("strip"):
            files = {name: stripped(path, pathlib.Path(scratch)) for name, path in files.items()}
        print(wheel(files, given.out, parts_list(files)))
    return 0


def build(profile: str) -> pathlib.Path:
    """The programs and the agent; where they are."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target")))
    cargo = os.environ.get("CARGO", "cargo")
    out = target / "wheel-programs"
    out.mkdir(parents=True, exist_ok=True)
    old = out / "old_glibc.o"
    source = HERE / "wheel" / "old_glibc.c"
    subprocess.run([os.environ.get("CC", "cc"), "-c", "-O2", "-fPIC", str(source), "-o", str(old)], check=True)
    names = [*re.findall(r"(?:__wrap_|OLD\()(\w+)", re.sub(r"#define.*(?:\\\n.*)*", "", source.read_text())), *OPTIONAL]
    flags = ["-C", "link-arg=" + str(old)]
    for name in sorted(set(names)):
        flags += ["-C", "link-arg=-Wl,--wrap=" + name]
    # Where the old versions live; since 2.34 these are empty.
    for library in ("libpthread.so.0", "libdl.so.2", "libm.so.6"):
        flags += ["-C", "link-arg=-Wl,--no-as-needed,-l:" + library]
    locked = ["--profile", profile, "--locked", "--quiet"]
    built = target / ("debug" if profile == "dev" else profile)
    for name in PROGRAMS:
        subprocess.run([cargo, "rustc", *locked, "-p", name, "--bin", name, "--", *flags], check=True, cwd=ROOT)
        shutil.copy2(built / name, out / name)
    subprocess.run([cargo, "build", *locked, "-p", "gpumem-agent"], check=True, cwd=ROOT)
    shutil.copy2(built / LIBRARY, out / LIBRARY)
    for name in (*PROGRAMS, LIBRARY):
        if glibc(out / name) > OLDEST:
            said = "{}.{}".format(*glibc(out / name))
            raise SystemExit("{} asks for glibc {}: {} must replace what does".format(name, said, source))
    return out


def stripped(path: pathlib.Path, scratch: pathlib.Path) -> pathlib.Path:
    """Without what only a debugger reads."""
    copy = scratch / path.name
    shutil.copy2(path, copy)
    subprocess.run(["strip", "--strip-unneeded", str(copy)], check=True)
    return copy


def parts_list(files: Dict[str, pathlib.Path]) -> bytes:
    """Returns the list of components (PEP 770)."""
    named = ["{}={}".format(name, path) for name, path in files.items()]
    command = [sys.executable, str(ROOT / "packaging" / "sbom.py"), "pkg:pypi/gpumem", version(), *named]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def version() -> str:
    return re.search(r'^version = "(.*)"', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.M)[1]  # type: ignore[index]


def glibc(path: pathlib.Path) -> Tuple[int, int]:
    """The newest version of glibc that an ELF file asks for: it is not loaded with an older one."""
    elf = path.read_bytes()
    if elf[:6] != b"\x7fELF\x02\x01":
        raise SystemExit("{}: not a 64-bit little-endian ELF file".format(path))
    (start,), (size, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQII", elf, start + at * size) for at in range(count)]
    newest = (2, 0)
    for _, kind, _, _, offset, _, link, entries in sections:
        if kind != 0x6FFFFFFE:  # .gnu.version_r
            continue
        strings, need = sections[link][4], offset
        for _ in range(entries):
            _, wanted, _, first, following = struct.unpack_from("<HHIII", elf, need)
            at = need + first
            for _ in range(wanted):
                name_at, after = struct.unpack_from("<II", elf, at + 8)
                name = elf[strings + name_at : elf.index(b"\0", strings + name_at)].decode()
                found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", name)
                if found:
                    newest = max(newest, (int(found[1]), int(found[2])))
                at += after
            need += following
    return newest


def tag(files: Dict[str, pathlib.Path]) -> str:
    """What pip compares with the system."""
    machine = platform.machine()
    major, minor = max(map(glibc, files.values()))
    if (major, minor) <= (2, 17):
        return "manylinux_2_17_{0}.manylinux2014_{0}".format(machine)
    return "manylinux_{}_{}_{}".format(major, minor, machine)


def wheel(files: Dict[str, pathlib.Path], out: pathlib.Path, sbom: bytes) -> pathlib.Path:
    """Writes it; where it is."""
    project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    summary = re.search(r'^description = "(.*)"', project, re.M)[1]  # type: ignore[index]
    platforms = tag(files)
    stem = "gpumem-" + version()
    parts: List[Tuple[str, bytes, bool]] = []
    for path in sorted((HERE / "gpumem").rglob("*")):
        if path.suffix in (".py", ".pyi") or path.name == "py.typed":
            parts.append((path.relative_to(HERE).as_posix(), path.read_bytes(), False))
    library = files[LIBRARY].read_bytes()
    parts.append(("gpumem/" + LIBRARY, library, True))
    parts.append(("{}.data/data/lib/gpumem/{}/{}".format(stem, version(), LIBRARY), library, True))
    for name in PROGRAMS:
        parts.append(("{}.data/scripts/{}".format(stem, name), files[name].read_bytes(), True))
    info = stem + ".dist-info/"
    metadata = [
        "Metadata-Version: 2.1",
        "Name: gpumem",
        "Version: " + version(),
        "Summary: " + summary,
        "License: Apache-2.0",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Typing :: Typed",
        "Requires-Python: >=3.9",
        "Description-Content-Type: text/markdown",
        "",
        (HERE / "README.md").read_text(encoding="utf-8"),
    ]
    tags = ["Tag: py3-none-" + each for each in platforms.split(".")]
    build_info = ["Wheel-Version: 1.0", "Generator: gpumem", "Root-Is-Purelib: false", *tags]
    parts.append((info + "METADATA", "\n".join(metadata).encode(), False))
    parts.append((info + "WHEEL", ("\n".join(build_info) + "\n").encode(), False))
    parts.append((info + "sboms/gpumem.cdx.json", sbom, False))
    parts.append((info + "licenses/LICENSE", (ROOT / "LICENSE").read_bytes(), False))
    record = "".join("{},sha256={},{}\n".format(name, digest(data), len(data)) for name, data, _ in parts)
    parts.append((info + "RECORD", (record + info + "RECORD,,\n").encode(), False))
    out.mkdir(parents=True, exist_ok=True)
    place = out / "{}-py3-none-{}.whl".format(stem, platforms)
    when = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800))[:6]
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data, executable in parts:
            entry = zipfile.ZipInfo(name, when)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            archive.writestr(entry, data)
    return place


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
