#!/usr/bin/env python3
"""Proves gpumemd on the GPU of this machine, or, with --dry-run, itself on the simulated one. See README.md.

    run.py --bin DIR --out DIR [--dry-run] [--plan N] [--only NAME...] [--minutes N]
"""

import argparse
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from suite import checks  # noqa: E402, F401  (registers them)
from suite.check import CHECKS, missing, run_one  # noqa: E402
from suite.machine import Machine  # noqa: E402
from suite.plans import MINUTES, PLANS, members, plan_of, times  # noqa: E402
from suite.questions import QUESTIONS  # noqa: E402
from suite.results import Report, Result  # noqa: E402

PR_SET_CHILD_SUBREAPER = 36
# More checks, for the suite's own tests: a module that can be imported.
if os.environ.get("GPU_SUITE_CHECKS"):
    importlib.import_module(os.environ["GPU_SUITE_CHECKS"])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, help="gpumemd, gpumemctl, libgpumem.so, trainer")
    parser.add_argument("--fake", type=Path, help="simulated GPU of a dry run, where it is not in --bin")
    parser.add_argument("--out", type=Path, help="where results go")
    parser.add_argument("--dry-run", action="store_true", help="on the simulated GPU")
    parser.add_argument("--torch", type=Path, help="of a dry run: a folder that `make -C tests/torch wheel-VERSION` made")
    parser.add_argument("--costs", type=Path, help="of a dry run: what calls cost (default: tests/fake-gpu/costs.txt)")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY=VALUE",
                        help="of a dry run: keys of the simulated GPU in every check (fake-gpu keys)")
    parser.add_argument("--plan", type=int, choices=PLANS, help="one of three calls for a GPU that is lent for minutes")
    parser.add_argument("--only", nargs="+", default=[], help="checks by name, or by the beginning of one")
    parser.add_argument("--minutes", type=float, help=f"then the rest is skipped (default: 60, {MINUTES} for a plan)")
    parser.add_argument("--list", action="store_true", help="list the checks with their claims")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(name, state):
    """Runs one check in a separate process."""
    machine = Machine.from_json(state.read_text())
    run_one(machine, name, Result(CHECKS[name], machine.work / "results" / f"{name}.json"))


def children():
    """Returns this process's children: started by it, or inherited from a check that ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def clear_up():
    """Kills processes that a check left. Their children become ours, and the next round kills them."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = children()
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for pid in left:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
        time.sleep(0.01)


def nothing(check, verdict, reason):
    """Returns the result of a check that did not write one."""
    return {"name": check.name, "claim": check.claim, "where": check.where, "verdict": verdict, "reason": reason,
            "questions": list(check.questions), "measured": {}, "expected": [], "notes": [], "answers": []}


def run_check(machine, name, limit, state):
    """Runs one check and returns its result, also if it crashes or times out."""
    path = machine.work / "results" / f"{name}.json"
    log = machine.work / f"check-{name}.log"
    environment = dict(os.environ, LD_LIBRARY_PATH=str(machine.fake / "lib")) if machine.dry else None
    started = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen([sys.executable, __file__, "--worker", name, "--state", state], env=environment,
                                   stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            code, why = process.wait(limit), None
        except subprocess.TimeoutExpired:
            process.kill()
            code, why = process.wait(), f"it took longer than {limit:.0f} s"
    clear_up()
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        result = nothing(CHECKS[name], "fail", "no result")
    if code:
        result["verdict"] = "fail"
        result["reason"] = why or f"the check's process ended with {code}: {log.read_text(errors='replace')[-500:]}"
    result["seconds"] = round(time.monotonic() - started, 2)
    return result


def chosen(only, plan):
    unknown = [o for o in only if not any(name.startswith(o) for name in CHECKS)]
    if unknown:
        sys.exit(f"no such check: {', '.join(unknown)} (--list shows all)")
    names = [name for name in CHECKS if not only or any(name.startswith(o) for o in only)]
    return members(plan, names) if plan else names


def main():
    options = arguments()
    if options.list:
        for c in CHECKS.values():
            print(f"{c.name:28} plan {plan_of(c.name)[0]}: {c.claim} ({c.where})")
        print("\nQuestions that hardware must answer, and the checks that do:")
        for number, text in QUESTIONS.items():
            print(f"{number:2}. {text}\n    {', '.join(c.name for c in CHECKS.values() if number in c.questions)}")
        return 0
    if options.worker:
        worker(options.worker, options.state)
        return 0
    if not options.bin or not options.out:
        sys.exit("--bin and --out are needed")
    names = chosen(options.only, options.plan)
    minutes = options.minutes or (MINUTES if options.plan else 60)
    started = time.monotonic()
    deadline = started + minutes * 60
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    work = Path(tempfile.mkdtemp(prefix="gpumem-gpu-"))
    machine = Machine(options.bin.resolve(), work, options.dry_run,
                      options.fake.resolve() if options.fake else None, sys.executable)
    machine.costs = str(options.costs.resolve()) if options.costs else None
    machine.keys = options.keys
    if options.torch:
        machine.torch, machine.python = str(options.torch.resolve()), str((options.torch / "venv/bin/python").absolute())
    machine.prepare({need for name in names for need in CHECKS[name].needs})
    (work / "results").mkdir(exist_ok=True)
    state = work / "state.json"
    state.write_text(machine.to_json())
    title = "gpumemd: dry run on the simulated GPU" if options.dry_run else "gpumemd on a GPU"
    report = Report(options.out, work, f"{os.uname().sysname} {os.uname().release}, work folder {work}", title)
    print(f"prepared in {time.monotonic() - started:.1f} s: {', '.join(sorted(machine.built)) or 'nothing to build'}", flush=True)
    packed = time.monotonic()
    for name in names:
        left = deadline - time.monotonic()
        if left < 2:
            result = nothing(CHECKS[name], "skip", f"the {minutes:g} minutes were over")
            result["late"] = True
        elif missing(machine, CHECKS[name]):
            result = nothing(CHECKS[name], "skip", missing(machine, CHECKS[name]))
        else:
            result = run_check(machine, name, min(CHECKS[name].seconds, left), state)
        report.add(result)
        reason = ": " + " ".join(result["reason"].split()) if result["reason"] else ""
        print(f"{result['verdict']:8} {name} {result.get('seconds', 0):.1f} s{reason}"[:400], flush=True)
        if time.monotonic() - packed > 30:
            report.pack()
            packed = time.monotonic()
    report.write()
    report.pack()
    for line in times(report.results):
        print(line)
    failed = [r["name"] for r in report.results if r["verdict"] == "fail"]
    print(f"{len(report.results)} checks, {len(failed)} failed; {options.out}/results.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
