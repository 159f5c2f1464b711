"""Where the suite runs: a real GPU, or the simulated one of tests/fake-gpu (a dry run). Programs, their environment,
and the programs of ../programs, built once."""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
DRIVER = ["core.c", "process.c", "memory.c", "space.c", "loops.c", "table.c", "cupti.c"]
# Variables that the shell may have set, and that programs must not inherit.
OURS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "GPUMEM_", "XDG_RUNTIME_DIR", "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF")

# Python modules that checks need, and an expression that is true where they see the GPU.
MODULES = {"torch": "torch.cuda.is_available()", "cupy": "cupy.cuda.runtime.getDeviceCount() > 0",
           "jax": "any(d.platform == 'gpu' for d in jax.devices())"}


def library_version(path):
    """(11, 8) of libcupti.so.11.8."""
    return tuple(map(int, re.findall(r"[0-9]+", path.rpartition(".so.")[2])))


class Machine:
    """Made once by run.py; handed to each check's process as JSON."""

    def __init__(self, bin, work, dry, fake=None, python="python3"):
        self.bin, self.work, self.dry = Path(bin), Path(work), dry
        self.fake = Path(fake or bin)
        self.python = python
        self.built, self.can, self.cupti = {}, {}, None
        self.cuptis = []  # every libcupti that was found, the carried ones included
        self.cudart = None  # a libcudart of this machine
        self.keys = []  # of the simulated machine of every check of a dry run
        self.costs = None  # a table for the simulated GPU, other than its own
        self.torch = None  # of a dry run: a folder with PyTorch, as tests/torch makes it

    def to_json(self):
        return json.dumps(vars(self), default=str)

    @classmethod
    def from_json(cls, text):
        state = json.loads(text)
        machine = cls(state["bin"], state["work"], state["dry"], state["fake"], state["python"])
        for name in ("built", "can", "cupti", "cuptis", "cudart", "keys", "costs", "torch"):
            setattr(machine, name, state[name])
        return machine

    # programs of the product

    def program(self, name):
        """gpumemd, gpumemctl, libgpumem.so, trainer; None if it was not brought along."""
        for place in (self.bin / name, self.bin / "bin" / name, self.fake / "bin" / name):
            if place.exists():
                return place.resolve()
        return None

    def prepare(self, needs):
        """Tests which requirements of the chosen checks this machine meets, and builds the programs. A failure is stored as
        the reason to skip, and is no error."""
        self.work.mkdir(parents=True, exist_ok=True)
        build = self.work / "build"
        build.mkdir(exist_ok=True)
        for name in ("gpumemd", "gpumemctl", "libgpumem.so", "trainer"):
            self.can[name] = None if self.program(name) else f"{name} is not in {self.bin}"
        c = [shutil.which("gcc") or shutil.which("cc"), "-std=c11", "-D_GNU_SOURCE", "-O2"]
        nvcc = None if self.dry else shutil.which("nvcc", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")
        # The shared runtime of the same toolkit, from the folders that the loader searches by default.
        shared = ["-cudart", "shared", "-Xlinker", f"-rpath={Path(nvcc).resolve().parents[1] / 'lib64'}"] if nvcc else []
        # An H100 or newer. -arch=native would make nvcc query the GPU, which fails in some containers.
        cuda = [nvcc, "-O2", "-arch=sm_90"]
        programs = {
            "driver": [*c, *DRIVER, "-ldl", "-pthread"],
            "nvml_cost": [*c, "nvml_cost.c", "-ldl"],
            "probe": [*c, "probe.c", "-ldl", "-pthread"],
            "client": [*c, "-shared", "-fPIC", "client.c", "-ldl"],
            "runtime": [*cuda, *shared, "runtime.cu"],
            "runtime_static": [*cuda, "-cudart", "static", "runtime.cu"],
        }
        needs = set(needs) | {"driver"}  # Test.listed asks with it
        # nvcc and the import of a framework take many seconds: all at the same time.
        with ThreadPoolExecutor() as pool:
            for name, command in programs.items():
                if name in needs:
                    why = "no nvcc, or a dry run" if name.startswith("runtime") else "no C compiler"
                    pool.submit(self.build, name, [*command, "-o", build / name] if command[0] else None, why)
            looks = {name: pool.submit(self.look_for_module, name, code) for name, code in MODULES.items() if name in needs}
        self.can.update((name, look.result()) for name, look in looks.items())
        self.cupti = self.look_for_cupti()
        self.cudart = self.look_for_cudart()
        self.can["libcupti"] = None if self.cupti else "no libcupti beside a toolkit or Python"
        self.can["real"] = "a dry run: the simulated driver has made-up costs" if self.dry else None
        self.can["root"] = None if os.geteuid() == 0 else "needs root"
        self.can["namespaces"] = self.look_for_namespaces()
        self.can["user_namespaces"] = self.look_for_namespaces(user=True)

    def build(self, name, command, why):
        carried = self.program(name)
        if command is None and carried:
            self.built[name] = str(carried)
            self.can[name] = None
            return
        if command is None:
            self.can[name] = why
            return
        try:
            done = subprocess.run([str(c) for c in command], cwd=PROGRAMS, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.can[name] = f"{name} could not be built: {error}"
            return
        (self.work / f"build-{name}.log").write_text(" ".join(str(c) for c in command) + "\n" + done.stdout + done.stderr)
        if done.returncode == 0:
            self.built[name] = str(command[command.index("-o") + 1])
            self.can[name] = None
        else:
            self.can[name] = f"{name} could not be built: {done.stderr.strip()[:300]}"

    def look_for_module(self, name, code):
        """Why a Python module cannot be used on the GPU, None if it can."""
        if self.dry:
            return None if name == "torch" and self.torch else f"a dry run{' without --torch' * (name == 'torch')}"
        try:
            done = subprocess.run([self.python, "-c", f"import {name}; print({code})"], capture_output=True, text=True,
                                  timeout=120, env=dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false"))
        except subprocess.TimeoutExpired:
            return f"`import {name}` takes longer than 120 s"
        if done.returncode or not done.stdout.strip().endswith("True"):
            return f"no {name} that sees the GPU: {(done.stdout + done.stderr).strip()[-200:]}"
        return None

    def look_for_cupti(self):
        """Finds a libcupti for a program that is itself a CUPTI client."""
        if self.dry:
            self.cuptis = [str(self.fake / "lib" / f"libcupti.so.{version}") for version in ("11.8", "12", "13")]
            return self.cuptis[-1]
        found = self.libraries("libcupti.so.1[0-9]")
        carried = glob.glob(f"{self.bin}/cupti-*/libcupti.so.*")
        self.cuptis = sorted({os.path.realpath(p): p for p in found + carried}.values())
        return max(found or carried, key=library_version, default=None)

    def look_for_cudart(self):
        """The newest shared runtime."""
        return None if self.dry else max(self.libraries("libcudart.so.1[0-9]"), key=library_version, default=None)

    def libraries(self, name):
        """Paths of a CUDA library beside toolkits and Python packages."""
        places = ["/usr/local/cuda*/extras/CUPTI/lib64", "/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib"]
        places += [f"{path}/nvidia/*/lib" for path in sys.path if path.endswith("-packages")]
        return [p for place in places for p in glob.glob(f"{place}/{name}")]

    def look_for_namespaces(self, user=False):
        if not shutil.which("unshare"):
            return "unshare: not there"
        done = subprocess.run([*self.unshare(user), "true"], capture_output=True, text=True, timeout=30)
        return None if done.returncode == 0 else f"unshare: {done.stderr.strip()[:200]}"

    def unshare(self, user=False):
        """A PID namespace; for who is not root only inside a user namespace."""
        more = ["--user", "--map-root-user"] if user or os.geteuid() else []
        return ["unshare", *more, "--pid", "--fork", "--mount-proc", "--kill-child"]

    # the environment of programs

    def environment(self, home):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS) or k == "GPUMEM_SIM"}
        clean["HOME"] = str(home)
        clean["PYTHONUNBUFFERED"] = "1"
        clean["GPUMEM_STORE"] = str(Path(home) / "runs.sqlite")
        if self.dry:
            places = [self.fake / "lib", *([Path(self.torch) / "lib"] if self.torch else [])]
            clean["LD_LIBRARY_PATH"] = ":".join(map(str, reversed(places)))
            clean["GPUMEM_SIM"] = str(Path(home) / "machine")
        return clean

    def new_simulated_machine(self, home, *keys):
        """Returns a new simulated machine for a check of a dry run. Call costs come from tests/fake-gpu/costs.txt."""
        keys = [*([f"costs={self.costs}"] if self.costs else []), *self.keys, *keys]
        subprocess.run([str(self.fake / "bin" / "fake-gpu"), "init", str(Path(home) / "machine"),
                        f"cuda.version={13990 if self.torch else 13000}", *keys], check=True)
