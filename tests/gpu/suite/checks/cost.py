"""Cost of the agent and the daemon. All values are measured in adjacent pairs."""

import json
import os
import time
from pathlib import Path

from ..check import check
from ..stats import median, paired, summary
from .attach import until_end
from .common import GRANULE, MIB, Watched
from .views import family

AGENT = ("driver", "libgpumem.so")
DAEMON = AGENT + ("gpumemd",)


def in_turns(t, rounds, one):
    """Calls one(False) and one(True) `rounds` times, in alternating order. Returns the results of each as a list."""
    found = {False: [], True: []}
    for number in range(rounds):
        for with_agent in ((False, True) if number % 2 else (True, False)):
            found[with_agent].append(one(with_agent))
    return found[False], found[True]


def span(found):
    """Formats the confidence interval of a difference."""
    low, high = found["difference_95"]
    return f"95 %: {low:.2f} to {high:.2f}"


def environment(t, daemon, with_agent):
    return {"agent": daemon if with_agent else None}


@check("cost.cuinit", "what the agent adds to cuInit", "cupti.md 6.1: a few ms", needs=DAEMON, seconds=180, questions=(1,))
def cuinit(t):
    daemon = t.daemon()

    def one(with_agent):
        d = t.driver(**environment(t, daemon, with_agent))
        took = d.do("init")["ns"] / 1e6
        d.finish()
        return took

    one(False), one(True)
    found = paired(*in_turns(t, t.times(15, 3), one))
    t.measure("cuInit", found, "ms")
    t.answer(1, f"The agent adds {found['difference']:.2f} ms to cuInit at the median ({span(found)}).")
    if not t.dry:
        t.expect(found["difference"] <= 20, f"the agent adds {found['difference']:.2f} ms at the median (20 at most)")


@check("cost.pair", "what the agent adds to one cuMemAlloc and its free", "DESIGN 8", needs=DAEMON,
       seconds=240, questions=(10,))
def pair(t):
    daemon = t.daemon()
    for size, how in ((4096, ""), (2 * MIB, ""), (4096, "async")):
        count, blocks = t.times(300 if size > 4096 else 2000, 200), t.times(20, 5)
        name = f"pair of {size:,} B" + (" in stream order" if how else "")

        def one(with_agent):
            d = t.driver(**environment(t, daemon, with_agent))
            d.begin()
            means = d.do("bench", size, count, blocks, how)["means"]
            d.finish()
            return median(means)

        found = paired(*in_turns(t, t.times(7, 2), one))
        t.measure(f"{name}, process against process", found, "ns")
        d = t.driver(agent=daemon)
        d.begin()
        answer = d.ask("bench_paired", size, count, t.times(40, 6), how)
        d.finish()
        if answer["result"]:
            t.note(f"the agent cannot be paused ({answer['result']})")
        else:
            pairs = paired(answer["off"], answer["on"])
            t.measure(f"{name}, in one process, paused against not", pairs, "ns")
            t.answer(10, f"A {name} takes {pairs['difference']:.0f} ns longer ({span(pairs)}).")
        runs = daemon.runs(d.pid)
        t.measure(f"{name}: records lost meanwhile", runs[0]["coverage"]["lost"] if runs else None)


@check("cost.memory", "the agent costs the device no memory: a context, a kernel, 64 MiB with it and without it",
       "HOUSE, self-cost", needs=AGENT, seconds=90)
def memory(t):
    found = {}
    for with_agent in (False, True, False, True):
        d = t.driver(agent=t.recording(f"agent-{len(found)}") if with_agent else None)
        d.do("init")
        d.do("device", 0)
        base, row = 0 if t.listed else t.used(d.pid), {}
        d.do("context")
        row["context"] = t.used(d.pid) - base
        to = d.do("alloc", 64 * MIB)["id"]
        row["64 MiB"] = t.used(d.pid) - base
        launched = d.ask("launch", d.do("module", 0, 0, 1)["id"], to)
        row["kernel launched" if not launched["result"] else "module loaded"] = t.used(d.pid) - base
        d.finish()
        found.setdefault(with_agent, []).append(row)
    for name in found[False][0]:
        without, with_it = ([row.get(name) for row in found[arm]] for arm in (False, True))
        t.measure(name, {"without": without, "with the agent": with_it}, "B")
        t.expect(None not in with_it and max(with_it) - min(without) <= GRANULE,
                 f"{name}: at most a granule more with the agent ({with_it} and {without})")


@check("cost.launch", "the agent costs a kernel launch nothing", "cupti.md 2.4",
       needs=DAEMON + ("runtime",), seconds=180, questions=(10,))
def launch(t):
    daemon = t.daemon()

    def one(with_agent):
        p = t.program([t.machine.built["runtime"]], **environment(t, daemon, with_agent))
        lines = until_end(p)
        p.wait()
        return json.loads(lines[-1])["launch_ns"]

    found = paired(*in_turns(t, 7, one))
    t.measure("launch", found, "ns")
    t.answer(10, f"A kernel launch takes {found['difference']:.1f} ns longer ({span(found)}).")
    t.expect(found["percent_95"][0] <= 1, f"{found['percent']:.2f} % slower (95 %: {found['percent_95']})")


@check("cost.daemon", "what the daemon takes: memory and time, idle and with a busy process", "DESIGN 8", needs=DAEMON,
       seconds=90)
def daemon(t):
    w = Watched(t, more="")
    time.sleep(1)
    for name, busy in (("idle", False), ("with 2 threads that allocate", True)):
        if busy:
            w.driver.do("start", 65536, 100, 2)
        seconds = t.times(10, 2)
        before, began = times(w.daemon.pid), time.monotonic()
        time.sleep(seconds)
        after, took = times(w.daemon.pid), time.monotonic() - began
        if busy:
            loop = w.driver.do("stop")
            t.measure("calls a second meanwhile", 2 * loop["steps"] / took)
        used = {n: after.get(n, (0, 0))[0] - before.get(n, (0, 0))[0] for n in after}
        t.measure(f"{name}: share of one core", {n: round(100 * v / took, 2) for n, v in used.items()}, "%")
        t.measure(f"{name}: resident", {n: rss for n, (_, rss) in after.items()}, "KiB")
    t.measure("ready after", w.daemon.ready_s, "s")
    w.end()


def times(pid):
    """(CPU seconds, resident KiB) by role of the daemon's processes."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    for number, member in enumerate(sorted(family(pid))):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{member}/status").read_text()
        except OSError:
            continue
        rss = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
        name = "daemon" if member == pid else f"child {number}"
        found[name] = ((int(fields[11]) + int(fields[12])) / tick, rss)
    return found


@check("cost.rate", "a process that allocates as fast as it can: nothing is lost, or it is counted", "DESIGN 4, 8",
       needs=DAEMON, seconds=90)
def rate(t):
    w = Watched(t)
    w.driver.do("start", 4096, 0, 4)
    time.sleep(t.times(5, 1))
    loop = w.driver.do("stop")
    t.measure("calls", 2 * loop["steps"])
    t.measure("step", {k: loop[k] for k in ("p50_us", "p99_us", "worst_ns")})
    w.says("afterwards", 0, 30)
    w.end()
    runs = w.daemon.runs(w.pid)
    coverage = runs[0]["coverage"] if runs else {}
    t.measure("coverage", coverage)
    # A step is an allocation, and a free with records at its start and end. The first 8 steps of each thread free
    # nothing; the remaining blocks are freed at the end.
    said, made = coverage.get("events", 0) + coverage.get("lost", 0), 3 * loop["steps"]
    t.expect(said >= made, f"each record is received or counted as lost ({said:,} of {made:,})")


@check("cost.noise", "how far two identical runs differ: what the figures above can resolve", "HOUSE, self-cost",
       needs=("driver",), seconds=120)
def spread(t):
    def one(_):
        d = t.driver()
        d.begin()
        means = d.do("bench", 4096, t.times(2000, 200), t.times(20, 5))["means"]
        d.finish()
        return median(means)

    t.measure("the same against the same", paired(*in_turns(t, t.times(5, 2), one)), "ns")
    t.measure("its values", summary([one(False) for _ in range(t.times(5, 2))]), "ns")
