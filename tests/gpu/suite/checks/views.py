"""Output for people and Prometheus."""

import json
import subprocess
import time
from pathlib import Path

from ..check import check
from ..daemon import parse_metrics
from ..programs import until
from ..stats import summary
from .common import MIB, Watched

ALL = ("driver", "libgpumem.so", "gpumemd", "gpumemctl")


def say(t, daemon, *words, code=0):
    command = [str(t.machine.program("gpumemctl")), *map(str, words)]
    done = subprocess.run(command, env=t.environment(GPUMEM_CONTROL=daemon.runtime), capture_output=True, text=True,
                          timeout=60)
    name = "-".join(str(w).strip("-") for w in words)
    (t.home / f"{name}.txt").write_text(f"$ gpumemctl {' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    t.expect(done.returncode in (code if isinstance(code, tuple) else (code,)),
             f"gpumemctl {' '.join(map(str, words))} ends with {code} ({done.returncode}: {done.stderr[-200:]})")
    return done.stdout


@check("views.commands", "ps, report and doctor while it runs and after; their bytes are NVML's and the program's",
       "EXAMPLES, issue 3, 4", needs=ALL, seconds=90)
def commands(t):
    w = Watched(t)
    w.driver.do("tag", "model/layers.0")
    w.driver.do("many", 4 * MIB, 4)
    w.driver.do("untag")
    w.driver.do("alloc", 2 * MIB)
    used = w.says("while it runs", 18 * MIB)
    shown = say(t, w.daemon, "ps")
    t.expect(str(w.pid) in shown, "ps shows the process")
    rows = json.loads(say(t, w.daemon, "ps", "--json"))
    row = next((r for r in rows["processes"] if r["pid"] == w.pid), {})
    used = used if t.listed else None
    t.expect(row.get("used_bytes") == used, f"ps --json: used is {used} ({row.get('used_bytes')})")
    device = rows["devices"][0]
    sums = [device[k] for k in ("used_bytes", "free_bytes", "system_bytes")]
    if all(v is not None for v in sums):
        t.expect(sum(sums) == device["total_bytes"], f"the device adds up ({sums} of {device['total_bytes']:,})")
    t.measure("unaccounted of the device", device["unaccounted_bytes"], "B")
    for words in (("doctor",), ("doctor", w.pid)):
        # Exit code 1 means that it found something, which the text explains.
        t.note(say(t, w.daemon, *words, code=(0, 1)))
    live = say(t, w.daemon, "report", w.pid)
    t.expect("layers.0" in live or "model" in live, "the report of the live process names the tag")
    document = json.loads(say(t, w.daemon, "report", w.pid, "--json"))
    (t.home / "report.json").write_text(json.dumps(document, indent=1))
    w.end()
    until(15, "the run is closed", lambda: w.daemon.row(w.pid) is None)
    after = say(t, w.daemon, "report", w.pid)
    t.expect(str(w.pid) in after, "the report after the end is of this process")
    t.note(live)


@check("views.metrics", "Prometheus: the same bytes, nothing unknown is 0, series end with the process", "DESIGN 5, issue 3",
       needs=ALL[:3], seconds=90)
def metrics(t):
    w = Watched(t)
    bare = t.driver()
    bare.begin()
    w.driver.do("alloc", 12 * MIB)
    used = w.says("while it runs", 12 * MIB)
    if t.listed:
        w.daemon.settled(bare.pid, used_bytes=t.used(bare.pid))
    text = w.daemon.metrics()
    (t.home / "metrics.prom").write_text(text)
    series = parse_metrics(text)
    of = lambda pid, word: [v for n, labels, v in series if labels.get("pid") == str(pid) and word in n]
    if t.listed:
        t.expect(used in of(w.pid, "used"), f"used of the covered process is {used:,} ({of(w.pid, 'used')})")
        t.expect(of(bare.pid, "used"), "used of the other is there")
    else:
        t.expect(not of(w.pid, "process_used_bytes"), f"used of the covered process is absent ({of(w.pid, 'process_used_bytes')})")
    t.expect(12 * MIB in of(w.pid, "tracked"), f"its tracked is 12 MiB ({of(w.pid, 'tracked')})")
    t.expect(not of(bare.pid, "tracked"), f"its tracked is absent, not 0 ({of(bare.pid, 'tracked')})")
    t.measure("series", len(series))
    t.measure("bytes", len(text), "B")
    names = {n for n, _, _ in series}
    t.expect(all(n.startswith(("gpumem_", "gpumemd_", "process_")) for n in names), f"names are ours ({len(names)})")
    bare.finish()
    w.end()

    def gone():
        left = parse_metrics(w.daemon.metrics())
        return not [1 for _, labels, _ in left if labels.get("pid") in (str(w.pid), str(bare.pid))]

    until(15, "their series end", gone)
    took = []
    for _ in range(t.times(200, 30)):
        began = time.perf_counter_ns()
        w.daemon.metrics()
        took.append((time.perf_counter_ns() - began) / 1e6)
    t.measure("scrape from Python, new connection each", summary(took), "ms")


@check("views.nvml_release", "gpumemctl nvml release lets go of the driver, and takes it again", "DESIGN 2", needs=ALL)
def release(t):
    w = Watched(t)
    w.driver.do("alloc", 2 * MIB)
    w.says("before", 2 * MIB)

    def open_files():
        found = set()
        for pid in family(w.daemon.pid):
            for fd in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    found.add(str(fd.readlink()))
                except OSError:
                    pass
        return {f for f in found if f.startswith("/dev/nvidia")}

    t.measure("device files open before", sorted(open_files()))
    say(t, w.daemon, "nvml", "release", "--for", "2s")
    if t.dry:
        t.note("the simulated driver has no device files")
    else:
        until(5, "the device files are closed", lambda: not open_files())
    w.driver.do("alloc", 3 * MIB)
    time.sleep(2.5)
    w.says("taken again", 5 * MIB, 15)
    w.end()


def family(pid):
    """Returns the pids of a process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, before = {pid}, 0
    while len(found) != before:
        before = len(found)
        found |= {p for p, parent in parents.items() if parent in found}
    return found
