"""Generates the CUDA libraries that a wheel needs and that are not installed, from the wheel itself.

    stubs.py WHEEL OUT FAKE

WHEEL is a folder of shared libraries (`site-packages/torch/lib`), FAKE the output of `make` in the parent folder. OUT
gets a library for each soname that WHEEL needs and that neither it nor FAKE/lib (the simulated driver) has. A wheel
lists its imports with symbol versions, so no list is kept here and newer wheels work too. FAKE/cudart-N has the
hand-written parts for CUDA N, `cudart.o` for `libcudart.so.N`. Every symbol that these lack becomes a function that
returns 0.
"""

import mmap
import os
import re
import struct
import subprocess
import sys
from collections import defaultdict

DYNAMIC, DYNSYM, VERSION_NEEDS, VERSIONS = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
GLOBAL = 1


class Elf:
    """What a shared library needs, wants (name, version, library) and has."""

    def __init__(self, path):
        self.name = self.soname = os.path.basename(path)
        self.needs, self.wants, self.has = [], set(), set()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] == b"\x7fELF\x02\x01":
                self.read(data)

    def read(self, data):
        at, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, at + i * size) for i in range(count)]
        body = lambda s: data[s[4] : s[4] + s[5]]
        by_type = {s[1]: s for s in sections}
        if DYNSYM not in by_type:
            return
        strings = body(sections[by_type[DYNSYM][6]])
        text = lambda offset: strings[offset : strings.index(b"\0", offset)].decode()
        for tag, value in struct.iter_unpack("<qQ", body(by_type[DYNAMIC])):
            if tag == 0:
                break
            if tag == 1:
                self.needs.append(text(value))
            if tag == 14:
                self.soname = text(value)
        versions = {}
        if VERSION_NEEDS in by_type:
            needs, at = body(by_type[VERSION_NEEDS]), 0
            for _ in range(by_type[VERSION_NEEDS][7]):
                _, entries, library, first, following = struct.unpack_from("<HHIII", needs, at)
                inner = at + first
                for _ in range(entries):
                    _, _, index, name, step = struct.unpack_from("<IHHII", needs, inner)
                    versions[index & 0x7FFF] = (text(name), text(library))
                    inner += step
                at += following
        symbols = list(struct.iter_unpack("<IBBHQQ", body(by_type[DYNSYM])))
        of = struct.unpack(f"<{len(symbols)}H", body(by_type[VERSIONS])) if VERSIONS in by_type else [1] * len(symbols)
        for (name, info, _, section, _, _), version in zip(symbols, of):
            if section:
                self.has.add(text(name))
            elif info >> 4 == GLOBAL:
                self.wants.add((text(name), *versions.get(version & 0x7FFF, (None, None))))


def stem(soname):
    """`cublaslt` of `libcublasLt.so.13`: how the names of its functions begin."""
    word = re.sub(r"\.so.*", "", soname.removeprefix("lib")).lower()
    return {"cudart": "cuda", "nvtoolsext": "nvtx", "cuda": "cu", "nvshmem_host": "nvshmem"}.get(word, word)


def home(symbol, candidates):
    """The library with the longest stem that the symbol begins with."""
    plain = symbol.lstrip("_").lower()
    fits = [c for c in candidates if plain.startswith(stem(c))]
    return max(fits, key=lambda c: len(stem(c)), default=None)


def plan(wheel, simulated):
    """Returns {soname: {version: {symbol}}} of the libraries to generate.

    If a simulated library lacks a symbol that belongs to it, another library gets it that the user loads anyway: the
    loader
    compares only the version's name.
    """
    has = set().union(*(e.has for e in wheel))
    names = {e.soname for e in wheel} | {e.name for e in wheel}
    sims = {e.soname: e.has for e in simulated}
    foreign = re.compile(r"lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s|gomp|gfortran|quadmath|z)\.so|ld-linux")
    libraries = defaultdict(lambda: defaultdict(set))
    for elf in wheel:
        needs = [n for n in elf.needs if n not in names and not foreign.match(n)]
        missing = [n for n in needs if n not in sims]
        for n in missing:
            libraries[n][n] |= set()
        for symbol, version, library in elf.wants:
            if symbol in has or (library and (library in names or foreign.match(library))):
                continue
            library = library or home(symbol, needs)
            if library is None or symbol in sims.get(library, ()):
                continue  # None: the interpreter's, for instance
            into = library if library in missing else (missing or [None])[0]
            if into:
                libraries[into][version or into].add(symbol)
    return libraries


def defined(object_file):
    lines = subprocess.run(["nm", "--defined-only", "-g", object_file], check=True, capture_output=True, text=True)
    return {line.split()[-1] for line in lines.stdout.splitlines()}


def make(soname, versions, objects, out):
    mine = [o for o in objects if soname.startswith(f"lib{os.path.basename(o).removesuffix('.o')}.so")]
    written = set().union(*(defined(o) for o in mine))
    base = os.path.join(out, soname)
    with open(base + ".s", "w") as file:
        for symbol in sorted(set().union(*versions.values()) - written):
            file.write(f".globl {symbol}\n.type {symbol},@function\n{symbol}:\n")
        file.write('xorl %eax,%eax\nret\n.section .note.GNU-stack,"",@progbits\n')
    with open(base + ".map", "w") as file:
        own = versions.get(soname, set()) | written
        file.write(f"{soname} {{ global: {' '.join(s + ';' for s in sorted(own) or ['none'])} local: *; }};\n")
        for version, symbols in sorted(versions.items()):
            if version != soname:
                file.write(f"{version} {{ global: {' '.join(s + ';' for s in sorted(symbols))} }};\n")
    link = ["gcc", "-shared", "-pthread", f"-Wl,-soname,{soname}", f"-Wl,--version-script,{base}.map", "-Wl,-z,nodelete"]
    subprocess.run([*link, "-o", base, base + ".s", *mine, "-ldl"], check=True)
    os.remove(base + ".s")
    os.remove(base + ".map")


def main(wheel, out, fake):
    read = lambda folder: [Elf(os.path.join(folder, n)) for n in sorted(os.listdir(folder)) if ".so" in n]
    os.makedirs(out, exist_ok=True)
    libraries = plan(read(wheel), read(os.path.join(fake, "lib")))
    # `libcudart.so.11.0`, `libcudart.so.13`: one is asked for by every CUDA wheel.
    major = next(name for name in libraries if name.startswith("libcudart")).split(".so.")[1].split(".")[0]
    parts = os.path.join(fake, f"cudart-{major}")
    objects = [os.path.join(parts, name) for name in os.listdir(parts) if name.endswith(".o")]
    for soname, versions in libraries.items():
        make(soname, versions, objects, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
