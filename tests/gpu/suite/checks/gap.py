"""Memory that a process costs in addition to its allocations."""

import json

from ..check import Skip, check
from ..machine import PROGRAMS
from ..stats import slope
from .common import GRANULE, MIB, QUICK, Watched, becomes

AGENT = ("driver", "libgpumem.so")
DAEMON = AGENT + ("gpumemd",)


@check("gap.context", "what a context costs, the first and the next", "cupti.md 3, DESIGN 1", needs=("driver",))
def context(t):
    d = t.driver()
    d.do("init")
    d.do("device", 0)
    t.measure("listed after cuInit", t.listed_used(d.pid) is not None)
    total = t.nvml.memory()["used"]
    d.do("context")
    first = t.used(d.pid)
    t.measure("primary context", first, "B")
    t.measure("the device sees", t.nvml.memory()["used"] - total, "B")
    t.expect(first, f"the process is charged once it has a context ({first})")
    made = d.do("context_new")["id"]
    t.measure("a second one", t.used(d.pid) - first, "B")
    d.do("context_destroy", made)
    t.measure("left of the second", t.used(d.pid) - first, "B")
    d.do("release")
    t.measure("left after the release of the first", t.used(d.pid))
    d.finish()
    t.measure("the device after its end", t.nvml.memory()["used"] - total, "B")


@check("gap.modules", "what a module costs, against the agent's upper bound", "cupti.md 3", needs=AGENT)
def modules(t):
    path = t.recording()
    d = t.driver(agent=path)
    d.begin()
    sizes = [0, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
    charged = []
    for size in sizes:
        before = t.used(d.pid)
        id = d.do("module", size)["id"]
        charged.append(t.used(d.pid) - before)
        d.do("module_unload", id)
        t.measure(f"{size:,} B of globals", {"NVML": charged[-1], "left": t.used(d.pid) - before}, "B")
    d.finish()
    account = t.account(path)
    loaded = [r.bytes for r in account.events if r.detail == 2]
    t.measure("by the agent", loaded, "B")
    t.expect(len(loaded) >= len(sizes), f"each load is an event ({len(loaded)})")
    if not t.dry:
        below = [(s, b) for s, b in zip(sizes, loaded) if b < s]
        t.expect(not below, f"no event reports less than its module's globals {below}")
        base, per_byte = slope(sizes, charged)
        t.measure("NVML a byte of globals", per_byte)


@check("gap.local_memory", "local memory follows the model: bytes a thread x threads a processor x processors",
       "cupti.md 3", needs=("driver",), questions=(11,))
def local_memory(t):
    d = t.driver()
    facts = d.begin()
    out = d.do("alloc", 2 * MIB)["id"]
    resident = facts["processors"] * facts["threads_per_processor"]
    t.measure("resident threads", resident)
    limit = d.do("limit", 0)["value"]  # what every context holds from its beginning
    small = d.do("module", 0, 64)["id"]
    d.do("launch", small, out)
    before, answers, code = t.used(d.pid), [], 0
    for local in (4096, 16384, 65536):
        loaded = t.used(d.pid)
        id = d.do("module", 0, local)["id"]
        code += t.used(d.pid) - loaded
        answer = d.ask("launch", id, out)
        if answer["result"]:
            t.note(f"{local} B a thread: result {answer['result']}")
            continue
        # Memory of the module itself does not count as stack.
        grown, model = t.used(d.pid) - before - code, (local - limit) * resident
        answers.append(f"{local:,} B a thread: {grown:,} B where (bytes - {limit}) x resident threads is {model:,}")
        t.measure(f"{local} B a thread", {"NVML": grown, "model": model}, "B")
        t.expect(abs(grown - model) <= 0.1 * model + GRANULE, f"{local}: within 10 % of {model:,} ({grown:,})")
    t.answer(11, "Local memory that launches made: " + "; ".join(answers) + ".")


@check("gap.limits", "what stack, printf and heap limits cost", "cupti.md 3", needs=("driver",))
def limits(t):
    d = t.driver()
    d.begin()
    before = t.used(d.pid)
    for which, name, value in ((0, "stack", 8192), (1, "printf", 16 * MIB), (2, "heap", 64 * MIB)):
        answer = d.ask("limit", which, value)
        t.measure(f"{name} limit {value:,}", {"result": answer["result"], "NVML": t.used(d.pid) - before}, "B")
    d.finish()


PARTS = ("context", "modules", "local_memory", "heaps", "rounding", "unexplained")


def judge(t, daemon, pid):
    """Checks the acceptance criterion of DESIGN 8: at least 95 % of NVML's charge beyond the tracked bytes has a
    measured
    part, or a part predicted by a model (reference/cupti.md 3). A model's error is in `unexplained`, with all else."""
    if not t.listed:
        raise Skip("NVML lists no process, so there is no gap to explain")
    last, used = {}, t.used(pid)

    def whole():
        nonlocal last, used
        used = t.used(pid)
        runs = daemon.runs(pid)
        last = runs[0]["devices"][0]["last"] if runs and runs[0]["devices"] else {}
        known = [last.get(k) for k in ("predates_bytes", "tracked_bytes", "untrackable_bytes")]
        return None not in known and sum(known) == used

    fits = becomes(whole, 15)
    said = [last.get(k) for k in ("predates_bytes", "tracked_bytes", "untrackable_bytes")]
    t.expect(fits, f"the report adds up to NVML's {used} B (predates, tracked, untrackable are {said})")
    parts, gap = last.get("parts"), last.get("untrackable_bytes")
    if not fits:
        return None
    if not parts or not gap:
        raise Skip(f"the report has no parts of the gap (it is {gap} B): not in this version, or no sample")
    t.measure("untrackable", gap, "B")
    parts = {f"{name}_bytes": 0 for name in PARTS} | parts  # what is nothing is not said
    for name in PARTS:
        t.measure(f"part {name}", parts[f"{name}_bytes"], "B")
    t.expect(sum(parts[f"{name}_bytes"] for name in PARTS) == gap, "the parts are the whole")
    explained = 1 - abs(parts["unexplained_bytes"]) / gap
    t.measure("explained", round(100 * explained, 2), "%")
    t.expect(explained >= 0.95, f"95 % are measured or modelled ({100 * explained:.1f} %)")
    details = daemon.runs(pid)[0]["devices"][0].get("details", {})
    steps = details.get("steps")
    if steps is not None:
        t.measure("steps", len(steps))
        (t.home / "steps.json").write_text(json.dumps(steps, indent=1))
        t.measure("the largest", sorted(steps, key=lambda s: -abs(s.get("bytes", 0)))[:8])
    return parts


@check("gap.explained", "of what NVML charges beside allocations, 95 % is measured or modelled: context, modules, limits",
       "DESIGN 8, cupti.md 3", needs=DAEMON, seconds=90)
def explained(t):
    w = Watched(t)
    d, tracked = w.driver, 0
    for size in (1, 4096, 700000, 3 * MIB + 1, 20 * MIB):
        d.do("alloc", size)
        tracked += size
    d.do("module", 4 * MIB)
    d.do("limit", 0, 8192)
    d.do("limit", 1, 16 * MIB)
    d.do("limit", 2, 64 * MIB)
    to = d.do("alloc", 2 * MIB)["id"]
    used = d.do("module", 0, 0, 0, 3)["id"]  # printf and malloc, so that there is a FIFO and a heap
    d.do("launch", used, to)
    w.says("at its end", tracked + 2 * MIB)
    judge(t, w.daemon, w.pid)
    w.end()
    w.daemon.stop()
    t.publish(w.daemon.recordings[-1], "gap-explained", {"runs": [{"pid": w.pid, "tracked_bytes": tracked + 2 * MIB}]})


@check("gap.explained_nvcc", "the same for a program that nvcc built", "DESIGN 8, cupti.md 3",
       needs=("runtime", "libgpumem.so", "gpumemd"), seconds=90)
def explained_nvcc(t):
    daemon = t.daemon(QUICK)
    p = t.program([t.machine.built["runtime"], "hold"], agent=daemon)
    while not p.line(60).startswith("{"):
        pass
    judge(t, daemon, p.pid)
    p.say("")
    t.expect(p.wait() == 0, "the program ended well")
    daemon.stop()
    t.publish(daemon.recordings[-1], "gap-explained-nvcc", {"runs": [{"pid": p.pid}]})


@check("gap.explained_torch", "the same for training steps of PyTorch", "DESIGN 8, cupti.md 3",
       needs=("torch", "libgpumem.so", "gpumemd"), seconds=240)
def explained_torch(t):
    daemon = t.daemon(QUICK)
    p = t.program([t.machine.python, PROGRAMS / "torch_train.py", "--rounds", "1", "--arms", "on", "--hold"], agent=daemon)
    while not p.line(200).startswith("{"):
        pass
    judge(t, daemon, p.pid)
    p.say("")
    t.expect(p.wait() == 0, "the program ended well")
    daemon.stop()
    t.publish(daemon.recordings[-1], "gap-explained-torch", {"runs": [{"pid": p.pid}]})
