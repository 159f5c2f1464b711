#!/usr/bin/env python3
"""Builds the tests once and runs them lane by lane; `make test` and `make test-all` call it.

    lanes.py              the fast suite: cargo, a C compiler, make and python3 are enough
    lanes.py --all        the fast suite, then every slow lane
    lanes.py LANE...      these lanes only; `slow` is every slow lane
    lanes.py --only TEXT  of the chosen lanes, the tests whose name contains TEXT
    lanes.py --list       the lanes, what each needs, and its number of tests

A test belongs to the lane that a module on its path is named after (`torch::roles::...`), or else to the fast suite. The tests of one
top-level module run in one process, several processes at a time. A test that cannot run here calls `gpumem_test_support::skip`, and is
counted as skipped. Output of each process is kept in TARGET/tests. Exits with 1 when a test fails, with 2 when nothing can be run.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").resolve()
CARGO = os.environ.get("CARGO", "cargo")
REQUIRED = bool(os.environ.get("GPUMEM_TOOLS_REQUIRED"))
FAST = "fast"
#: A process of tests that takes longer hangs: none takes a quarter of this on an idle machine, but `make soak`.
HUNG_S = 1800 + int(os.environ.get("SOAK_SECONDS", "0"))

#: Variables of the caller that change what programs under test do. Those that steer the tests themselves stay.
FOREIGN = re.compile(r"^(GPUMEM_(?!SAMPLES|TOOLS_REQUIRED|TORCH|TEST|HOST|KEEP|KILLS|SOAK|PERFETTO|PAGE|SHOTS)|CUDA_|NVTX_|PYTORCH_|PYTHON(?!UTF8)|"
                     r"SLURM_|KUBERNETES_|RANK$|LOCAL_RANK$|WORLD_SIZE$|XDG_RUNTIME_DIR$|XDG_STATE_HOME$|RUST_LOG$|NO_COLOR$|CLICOLOR)")


def has(*programs):
    return any(shutil.which(program) for program in programs)


def succeeds(*command):
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def root():
    return os.geteuid() == 0


def namespaces():
    return succeeds("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "true")


def pip():
    return succeeds("python3", "-m", "pip", "--version")


#: Requirement of a lane: test for it, message if it is missing, and the command that provides it.
NEED_ROOT = (root, "needs root", "sudo make test-all LANES={lane}")
NEED_NAMESPACES = (namespaces, "needs mount and PID namespaces", "sudo make test-all LANES={lane}, in a container: --privileged")
NEED_APT = (lambda: has("apt-get"), "needs Debian's packages", "run it on Debian or Ubuntu")
NEED_PIP = (pip, "needs pip", "apt-get install python3-pip python3-venv")
NEED_CXX = (lambda: has("c++", "g++", "clang++"), "needs a C++ compiler", "apt-get install g++")


NEED_PLAIN_PATH = (lambda: not re.search(r"\s", f"{ROOT}{TARGET}"), "needs a path without spaces", "git clone into another folder")


def tool(name, package=None):
    return (lambda: has(name), f"needs {name}", f"apt-get install {package or name}")


class Lane:
    def __init__(self, about, *needs, alone=False):
        #: alone: nothing else runs meanwhile.
        self.about, self.needs, self.alone = about, needs, alone

    def missing(self, name):
        for is_here, reason, command in self.needs:
            if not is_here():
                return reason, command.format(lane=name)
        return None


#: The slow lanes. Those that are not alone share the machine.
LANES = {
    "gpu": Lane("tests/gpu, the suite for a real GPU, on the simulated one"),
    "python": Lane("other versions of CPython, third-party Python packages", NEED_PLAIN_PATH, NEED_PIP, NEED_APT, NEED_CXX),
    "torch": Lane("unmodified PyTorch wheels; downloads 4 GB once", NEED_PLAIN_PATH, NEED_PIP, NEED_CXX,
                  (lambda: has("python3.11", "python3.12", "python3.10"), "needs CPython 3.10, 3.11 or 3.12", "apt-get install python3.11-venv")),
    "nvidia": Lane("NVIDIA's own libcuda, libcupti and libnvidia-ml, without a GPU; downloads 150 MB once", NEED_PLAIN_PATH, NEED_PIP, NEED_APT),
    "browser": Lane("pages in a real Chromium", (lambda: has("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
                                                  "needs Chromium", "apt-get install chromium")),
    "prometheus": Lane("a real Prometheus, promtool, Grafana's schema", (lambda: has("prometheus") or has("apt-get"), "needs Prometheus", "apt-get install prometheus")),
    "package": Lane("Debian package, RPM, wheel, archive, image, licences", NEED_PLAIN_PATH, NEED_ROOT, NEED_PIP, tool("lintian"), tool("buildah"), tool("mmdebstrap"), tool("rpmbuild", "rpm")),
    "fleet": Lane("Slurm, Kubernetes, containers, launchers", NEED_PLAIN_PATH, NEED_ROOT, NEED_NAMESPACES, NEED_APT),
    "privileged": Lane("what only root can set up: other users, namespaces, control groups", NEED_ROOT, NEED_NAMESPACES),
    "peers": Lane("hostile peers on every socket", NEED_ROOT),
    "systemd": Lane("the shipped units in a Debian that boots", NEED_PLAIN_PATH, NEED_ROOT, NEED_NAMESPACES, tool("mmdebstrap")),
    # Its programs lose no records as long as their senders run in time.
    "soak": Lane("programs that come and go while things go wrong", alone=True),
    "timing": Lane("how long things take; part of `make bench`, not of --all", alone=True),
}

#: The slowest modules, slowest first: they start first, so that other modules run in parallel with them.
SLOW = ["peers", "operators", "deb", "compiled", "host", "roles", "gpu_dry_run", "real", "churn", "wheel", "kubernetes", "nvml", "live_faults", "pictures", "kinds", "store", "properties", "live", "causes_any", "docs"]

Result = collections.namedtuple("Result", "lane unit passed failed skipped began ended")


def build():
    """Builds everything that the tests use in one go: one set of features, so that no crate is compiled twice. Returns test programs."""
    command = [CARGO, "build", "--workspace", "--locked", "--lib", "--bins", "--tests", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit("the build failed: see above")
    programs = []
    for line in built.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("reason") == "compiler-artifact" and message.get("executable") and message["profile"]["test"]:
            programs.append((message["target"]["name"], pathlib.Path(message["manifest_path"]).parent, message["executable"]))
    for part in ("fake-gpu", "trainer", "mixer", "gap"):
        # make does not support spaces in paths: a relative path has none.
        folder = ROOT / "tests" / part
        made = subprocess.run(["make", "-s", "-C", folder, f"OUT={os.path.relpath(TARGET / 'fake-gpu', folder)}"])
        if made.returncode:
            sys.exit(f"tests/{part} cannot be built: see above")
    return programs


def lane_of(test):
    return next((part for part in test.split("::")[:-1] if part in LANES), FAST)


def units(programs, wanted, only):
    """Tests by lane and unit, a unit being one process: (lane, crate, module) -> (program, folder, tests)."""
    found = {}
    for name, folder, program in programs:
        listed = subprocess.run([program, "--list", "--format", "terse"], cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
        for line in listed.splitlines():
            test, _, kind = line.rpartition(": ")
            lane = lane_of(test) if name == "suite" else FAST
            if kind != "test" or lane not in wanted or only not in f"{folder.name} {test}":
                continue
            # Unit tests of a crate, which are quick, run in one process, and so do those of a file such as tests/rules.rs.
            of_file = name if (folder / "tests" / f"{name}.rs").exists() else "unit tests"
            module = test.split("::")[0] if name == "suite" else of_file
            module = test.split("::")[1] if module == lane and test.count("::") > 1 else module
            found.setdefault((lane, folder.name, module), (program, folder, []))[2].append(test)
    return found


def environment(scratch):
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    # What cargo would set.
    for line in (ROOT / ".cargo/config.toml").read_text().splitlines():
        name, equals, value = line.partition(" = ")
        if equals and name.isupper():
            kept.setdefault(name, value.strip('"'))
    kept.update(CARGO=CARGO, TMPDIR=scratch, GPUMEM_TEST_BUILT="1", LC_ALL="C.UTF-8")
    return kept


def restore_signals():
    """Programs that were started in the background by a shell ignore these; tests send them."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def is_for_everybody(folder):
    """Whether every user may enter the folder."""
    return all(os.stat(above).st_mode & 0o1 for above in (folder, *folder.parents))


def copies_for_everybody(scratch):
    """Copies of the programs under test where every user may execute them, as `ours` and `fake-gpu` below the folder that is returned."""
    folder = pathlib.Path(scratch, "programs")
    ours = TARGET / "debug"
    (folder / "ours").mkdir(parents=True)
    for name in ("gpumemd", "gpumemctl", "gpumem-mcp", "libgpumem.so"):
        shutil.copy2(ours / name, folder / "ours" / name)
    shutil.copytree(TARGET / "fake-gpu", folder / "fake-gpu", symlinks=True)
    return folder


class Runner:
    def __init__(self, scratch):
        self.scratch = scratch
        self.environment = environment(scratch)
        self.results, self.skips, self.failures = [], [], []

    def run(self, unit, program, folder, tests):
        lane, crate, module = unit
        log = TARGET / "tests" / lane / f"{crate}.{module.replace(' ', '-')}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        skips = pathlib.Path(self.scratch, f"skips.{lane}.{crate}.{module.replace(' ', '-')}")
        env = dict(self.environment, CARGO_MANIFEST_DIR=str(folder), GPUMEM_TEST_SKIPS=str(skips))
        began = time.monotonic()
        with log.open("w") as out:
            try:
                code = subprocess.run([program, "--exact", *tests], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                      stderr=subprocess.STDOUT, preexec_fn=restore_signals, timeout=HUNG_S).returncode
            except subprocess.TimeoutExpired:
                code = 124
                out.write(f"\nended after {HUNG_S} s: it hangs\n")
        ended = time.monotonic()
        text = log.read_text(errors="replace")
        summary = re.search(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", text, re.M)
        passed, failed, ignored = map(int, summary.groups()) if summary else (0, len(tests), 0)
        if passed + failed + ignored != len(tests):
            failed += 1
            text += f"\n{passed + failed + ignored - 1} of {len(tests)} tests ran: the others are not in {program}\n"
        if code and not failed:
            failed = 1
        skipped = {}
        if skips.exists():
            for line in skips.read_text().splitlines():
                test, reason, command = line.split("\t")
                skipped.setdefault(test, (reason, command))
        count = min(passed, len(skipped))
        result = Result(lane, f"{crate} {module}", passed - count, failed, count, began, ended)
        return result, skipped, (text if failed else None), log

    def lanes(self, names, found, workers):
        """Runs the tests of some lanes together; returns a row of the table for each."""
        order = {module: at for at, module in enumerate(SLOW)}
        todo = sorted((unit for unit in found if unit[0] in names), key=lambda unit: (order.get(unit[2], len(SLOW)), unit))
        results = []
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            running = [pool.submit(self.run, unit, *found[unit]) for unit in todo]
            for done in concurrent.futures.as_completed(running):
                result, skipped, text, log = done.result()
                results.append(result)
                self.skips += [(result.lane, test, *why) for test, why in skipped.items()]
                mark = "FAIL" if result.failed else "ok  "
                left = f", {result.skipped} skipped" if result.skipped else ""
                lane = "" if result.lane == FAST else f" {result.lane}:"
                print(f"{mark}{lane} {result.unit:34} {result.passed:4} passed{left}  {result.ended - result.began:.1f} s", flush=True)
                if text is not None:
                    self.failures.append((result.unit, log))
                    print(text, flush=True)
        rows = []
        for name in names:
            mine = [result for result in results if result.lane == name]
            if mine:
                counts = (sum(getattr(result, field) for result in mine) for field in ("passed", "failed", "skipped"))
                rows.append((name, *counts, max(result.ended for result in mine) - min(result.began for result in mine)))
        return rows


def what_failed(text, at_most=12):
    """Yields each failed test of a process with its panic message, or the last lines of the output where no test failed."""
    said = re.findall(r"^---- (\S+) stdout ----\n(.*?)(?=^---- \S+ stdout ----|^failures:$)", text, re.M | re.S)
    for test, output in said:
        yield f"    {test}"
        panic = re.search(r"^thread .* panicked at (?:.|\n)*?(?=^stack backtrace|^note: run with|\Z)", output, re.M)
        lines = [line for line in (panic[0] if panic else output).splitlines() if line.strip()]
        yield from (f"      {line[:500]}" for line in (lines[:at_most] if panic else lines[-at_most:]))
    if not said:
        yield from (f"      {line}" for line in [line for line in text.splitlines() if line.strip()][-at_most:])


def table(rows):
    print(f"\n{'lane':12} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
    for lane, passed, failed, skipped, seconds in rows:
        print(f"{lane:12} {passed:7} {failed:7} {skipped:8} {seconds:8.0f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", nargs="*", metavar="LANE", help=f"{FAST}, {', '.join(LANES)}")
    parser.add_argument("--all", action="store_true", help="the fast suite and every slow lane")
    parser.add_argument("--only", default="", metavar="TEXT", help="tests whose crate and name contain this")
    parser.add_argument("--list", action="store_true", help="print the lanes and stop")
    parser.add_argument("--bars", action="store_true", help="check how long things take, on a quiet machine: one process at a time")
    parser.add_argument("--workers", type=int, default=0, help="processes at a time in the fast suite (default: 2 for each core)")
    options = parser.parse_args()
    slow = [lane for lane in LANES if lane != "timing"]
    unknown = [lane for lane in options.lanes if lane not in (FAST, "slow", *LANES)]
    if unknown:
        parser.error(f"there is no lane {' '.join(unknown)}; there are {FAST}, {', '.join(LANES)}")
    wanted = [FAST, *slow] if options.all else options.lanes or [FAST]
    wanted = list(dict.fromkeys(name for lane in wanted for name in (slow if lane == "slow" else [lane])))
    os.umask(0o022)

    began = time.monotonic()
    programs = build()
    print(f"built in {time.monotonic() - began:.0f} s", flush=True)
    found = units(programs, (FAST, *LANES) if options.list else wanted, options.only)
    if options.list:
        for name in (FAST, *LANES):
            count = sum(len(tests) for unit, (_, _, tests) in found.items() if unit[0] == name)
            lane = LANES.get(name)
            missing = lane and lane.missing(name)
            print(f"{name:12} {count:5} tests  {lane.about if lane else 'all that needs no more than a compiler'}"
                  + (f"; here: {missing[0]} ({missing[1]})" if missing else ""))
        return 0

    scratch = tempfile.mkdtemp(prefix="gpumem-t.", dir="/tmp" if len(tempfile.gettempdir()) > 32 else None)
    os.chmod(scratch, 0o755)
    rows, failed = [], False
    try:
        runner = Runner(scratch)
        if options.bars:
            options.workers = 1
            runner.environment["GPUMEM_TEST_BARS"] = "1"
        groups = [[FAST]] if FAST in wanted else []
        shared = []
        for name in (name for name in wanted if name != FAST):
            lane, count = LANES[name], sum(len(tests) for unit, (_, _, tests) in found.items() if unit[0] == name)
            missing = lane.missing(name)
            if missing:
                runner.skips.append((name, "all", *missing))
                rows.append((name, 0, count if REQUIRED else 0, 0 if REQUIRED else count, 0))
                print(f"{'FAIL' if REQUIRED else 'skip'} lane {name}: {missing[0]}; get it with: {missing[1]}", flush=True)
            elif lane.alone:
                groups.append([name])
            else:
                shared.append(name)
        if shared:
            groups.insert(1 if FAST in wanted else 0, shared)
        for names in groups:
            if any(name != FAST and NEED_ROOT in LANES[name].needs for name in names) and not is_for_everybody(TARGET):
                if "GPUMEM_TEST_PROGRAMS" not in runner.environment:
                    runner.environment["GPUMEM_TEST_PROGRAMS"] = str(copies_for_everybody(scratch))
            counts = [f"{name} ({sum(len(tests) for unit, (_, _, tests) in found.items() if unit[0] == name)})" for name in names]
            print(f"\ntests: {', '.join(counts)}", flush=True)
            is_alone = names[0] != FAST and LANES[names[0]].alone
            rows += runner.lanes(names, found, 1 if is_alone else options.workers or 2 * (os.cpu_count() or 1))
    finally:
        if not any(row[2] for row in rows) and not os.environ.get("GPUMEM_KEEP"):
            shutil.rmtree(scratch, ignore_errors=True)
    if runner.skips:
        print("\nskipped:")
        for lane, test, reason, command in runner.skips:
            print(f"  {lane} {test}: {reason}" + (f"; get it with: {command}" if command else ""))
    if runner.failures:
        print("\nfailed:")
        for unit, log in runner.failures:
            print(f"  {unit}: {log}")
            print("\n".join(what_failed(log.read_text(errors="replace"))))
    table(rows)
    passed, failed, skipped = (sum(row[at] for row in rows) for at in (1, 2, 3))
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0 if passed else 2


if __name__ == "__main__":
    sys.exit(main())
