"""Describes the machine, without changing it."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from ..check import check


def said(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return (done.stdout + done.stderr).strip()


@check("facts.machine", "driver, CUDA and NVML versions, modes, cgroup", "DESIGN 2, nvml.md 1.4")
def machine(t):
    for name, value in t.nvml.facts().items():
        t.measure(name, value)
    memory = t.nvml.memory()
    for name, value in memory.items():
        t.measure(f"memory {name}", value, "B")
    t.measure("kernel", f"{os.uname().sysname} {os.uname().release} {os.uname().machine}")
    t.measure("libc", " ".join(platform.libc_ver()))
    t.measure("python", platform.python_version())
    t.measure("cpus", os.cpu_count())
    t.measure("cgroup", Path("/proc/self/cgroup").read_text().strip())
    t.measure("devices", " ".join(sorted(str(p) for p in Path("/dev").glob("nvidia*"))))
    t.measure("uid", os.getuid())
    t.measure("pid namespace", os.readlink("/proc/self/ns/pid"))
    if not t.dry:
        for name in ("nvcc", "gcc"):
            if shutil.which(name):
                t.measure(name, said(name, "--version").splitlines()[-1])
        (t.home / "nvidia-smi.txt").write_text(said("nvidia-smi") + "\n" + said("nvidia-smi", "-q"))
    for name, why in t.machine.can.items():
        t.note(f"{name}: {why or 'yes'}")
    t.measure("libcupti", t.machine.cuptis)
    t.measure("libcudart", t.machine.cudart)
    others = t.nvml.optional(t.nvml.processes)
    t.measure("processes on the GPU before", len(others) if isinstance(others, dict) else others)
    t.measure("NVML lists our processes", t.listed)
    if others:
        t.note(f"others hold {others}: sums over the device contain theirs")
    if memory["reserved"] is not None:
        rest = memory["total"] - memory["used"] - memory["free"] - memory["reserved"]
        t.measure("total - reserved - used - free", rest, "B")


@check("facts.programs", "the programs start here; the agent asks for glibc 2.28 at most", "DESIGN 4",
       needs=("gpumemd", "gpumemctl", "libgpumem.so"))
def programs(t):
    for name in ("gpumemd", "gpumemctl"):
        path = t.machine.program(name)
        version = said(str(path), "--version")
        t.measure(name, version)
        t.expect(re.search(r"\d+\.\d+", version), f"{name} --version answers: {version[:100]}")
        t.measure(f"{name} size", path.stat().st_size, "B")
    data = t.library.read_bytes()
    asked = {tuple(map(int, m.split(b"."))) for m in re.findall(rb"GLIBC_(2\.\d+)", data)}
    t.measure("agent asks for glibc", ".".join(map(str, max(asked))))
    t.measure("agent size", len(data), "B")
    t.expect(max(asked) <= (2, 28), f"glibc 2.28 is enough for the agent ({max(asked)})")
