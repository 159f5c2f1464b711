"""Tests which launchers pass environment variables on: each starts a child that prints the variables it received.

    launchers.py PYTHON...    interpreters that may have torch, ray or jupyter_client; missing ones are skipped

Prints a table. Exits with 1 if a launcher does not behave as documented in docs/launchers.md.
"""

import os
import shutil
import subprocess
import sys
import tempfile

LIBRARY = "/opt/gpumem/libgpumem.so"
SAY = ["sh", "-c", 'echo "said:$CUDA_INJECTION64_PATH:$GPUMEM_JOB"']
#: The same from Python.
SAY_PYTHON = "import os; print('said:%s:%s' % (os.environ.get('CUDA_INJECTION64_PATH', ''), os.environ.get('GPUMEM_JOB', '')))"

#: Simulates a remote machine: the command starts with a login environment.
REMOTE = """#!/bin/sh
shift
exec env -i PATH="$PATH" HOME="$HOME" LD_LIBRARY_PATH="$LD_LIBRARY_PATH" sh -c "$*"
"""

SPAWN = """
import multiprocessing, os
def say(_):
    return os.environ.get('CUDA_INJECTION64_PATH', ''), os.environ.get('GPUMEM_JOB', '')
if __name__ == '__main__':
    for method in ('fork', 'spawn', 'forkserver'):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print('said:%s:%s' % pool.map(say, [0])[0])
"""

RAY = """
import logging, os, ray
ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, {more})
@ray.remote
def say():
    return 'said:%s:%s' % (os.environ.get('CUDA_INJECTION64_PATH', ''), os.environ.get('GPUMEM_JOB', ''))
{before}
print(ray.get(say.remote()))
"""
RAY_ENV = "runtime_env={'env_vars': {k: os.environ[k] for k in ('CUDA_INJECTION64_PATH', 'GPUMEM_JOB')}}"

JUPYTER = """
import jupyter_client
manager, client = jupyter_client.manager.start_new_kernel()
answer = client.execute_interactive({say!r}, timeout=60)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


def has(python, module):
    return subprocess.run([python, "-c", "import " + module], capture_output=True).returncode == 0


def rows(pythons):
    """Yields each launcher's name, its command, and whether the variables arrive."""
    folder = tempfile.mkdtemp()

    def script(name, text):
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)
        return path

    for words in (["nohup"], ["setsid", "-w"], ["timeout", "60"], ["nice"], ["xargs", "-I{}"], ["stdbuf", "-oL"]):
        yield " ".join(words), words + SAY, True
    yield "env -i", ["env", "-i", *SAY], False
    yield "env -i, named again", ["env", "-i", "CUDA_INJECTION64_PATH=" + LIBRARY, "GPUMEM_JOB=j", *SAY], True
    yield "multiprocessing (fork, spawn, forkserver)", [sys.executable, script("spawn.py", SPAWN)], True
    if os.getuid() == 0:
        yield "su USER -c", ["su", "nobody", "-s", "/bin/sh", "-c", SAY[2]], True
        yield "su - USER -c", ["su", "-", "nobody", "-s", "/bin/sh", "-c", SAY[2]], False
    if shutil.which("sudo"):
        yield "sudo", ["sudo", "-n", *SAY], False
        yield "sudo --preserve-env=...", ["sudo", "-n", "--preserve-env=CUDA_INJECTION64_PATH,GPUMEM_JOB", *SAY], True
        yield "sudo -E", ["sudo", "-n", "-E", *SAY], True
    mpirun = shutil.which("mpirun") or shutil.which("mpirun.openmpi")
    if mpirun:
        one = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "1"]
        far = ["--host", "elsewhere", "--mca", "plm_rsh_agent", script("remote", REMOTE), "--mca", "plm", "rsh"]
        yield "mpirun, this machine", one + SAY, True
        yield "mpirun, another machine", one + far + SAY, False
        exported = ["-x", "CUDA_INJECTION64_PATH", "-x", "GPUMEM_JOB"]
        yield "mpirun -x ..., another machine", one + far + exported + SAY, True
    for python in pythons:
        if has(python, "torch.distributed.run"):
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]
            yield "torchrun", [python, *words, *SAY], True
        if has(python, "ray"):
            yield "ray, started by the program", [python, script("ray1.py", RAY.format(more="", before=""))], True
            started = {
                "ray, started before": ("address='auto'", False),
                "ray, started before, with runtime_env": ("address='auto', " + RAY_ENV, True),
            }
            ray = os.path.join(os.path.dirname(python), "ray")
            for name, (more, arrives) in started.items():
                text = RAY.format(more=more, before="").replace("num_cpus=1, include_dashboard=False, ", "")
                around = (
                    f"env -u CUDA_INJECTION64_PATH -u GPUMEM_JOB {ray} start --head --include-dashboard=false "
                    f"--disable-usage-stats --num-cpus=1 > /dev/null 2>&1; {python} {script('ray2.py', text)}; "
                    f"code=$?; {ray} stop --force > /dev/null 2>&1; exit $code"
                )
                yield name, ["sh", "-c", around], arrives
        if has(python, "jupyter_client, ipykernel"):
            yield "notebook kernel", [python, script("kernel.py", JUPYTER.format(say=SAY_PYTHON))], True


def main():
    environment = dict(os.environ, CUDA_INJECTION64_PATH=LIBRARY, GPUMEM_JOB="j")
    environment.update(RAY_DISABLE_IMPORT_WARNING="1", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    wrong = 0
    for name, command, expected in rows(sys.argv[1:]):
        ran = subprocess.run(
            command, env=environment, input="x\n", capture_output=True, text=True, errors="replace", timeout=180
        )
        heard = [line.strip() for line in ran.stdout.splitlines() if line.strip().startswith("said:")]
        arrived = bool(heard) and all(line == f"said:{LIBRARY}:j" for line in heard)
        if not heard:
            answer = "DID NOT RUN: " + (ran.stderr.strip().splitlines() or ["no output"])[-1]
        else:
            answer = ("arrive" if arrived else "are lost") + ("" if arrived == expected else " (NOT AS DOCUMENTED)")
        wrong += not heard or arrived != expected
        print(f"{name:44} {answer}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
