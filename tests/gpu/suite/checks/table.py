"""The call table: each driver call alone in a fresh process, with NVML before and after. Its last check, table.costs, makes
of the rows what the simulated GPU charges (suite/table.py, tests/fake-gpu/costs.txt)."""

import json
import subprocess
from pathlib import Path

from ..check import Skip, check
from ..table import MIB, Table, fit, parse, write

BASE = Path(__file__).resolve().parents[3] / "fake-gpu" / "costs.txt"
NEEDS = ("driver",)
SIZES = [1, 256, 512, 513, 4096, 65536, 65537, 262144, 524288, 3 * MIB // 4, MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB,
         2 * MIB + 1, 3 * MIB, 4 * MIB, 4 * MIB + 1, 5 * MIB, 8 * MIB, 16 * MIB, 20 * MIB, 31 * MIB, 32 * MIB, 32 * MIB + 1, 48 * MIB,
         64 * MIB - 1, 64 * MIB]


def shares(table, size):
    """Returns whether one more byte fits into the memory charged for an allocation of this size."""
    with table.process() as p:
        first = p.weigh(f"{size:,} B", "alloc", size, size=size, first=True)
        after = p.weigh(f"a byte after {size:,} B", "alloc", 1, size=size, probe=True, quiet=True)
        p.weigh(f"{size:,} B again", "alloc", size, size=size, quiet=True)
        p.weigh(f"{size:,} B, all freed", "free_all", size=size, quiet=True)
    return not first["result"] and not after["weight"]


@check("table.sizes", "what one cuMemAlloc costs, 1 B to 64 MiB; the granule; from which size on it is not shared",
       "cupti.md 2.3", needs=NEEDS, seconds=300, questions=(5,))
def sizes(t):
    table = Table(t)
    shared = {size: shares(table, size) for size in SIZES}
    small = [size for size in SIZES if shared[size]]
    if small:
        low = max(small)
        high = min((size for size in SIZES if size > low), default=None)
        while high and high - low > 512:
            middle = (low + high) // 2 // 512 * 512
            if middle <= low:
                break
            low, high = (middle, high) if shares(table, middle) else (low, middle)
    with table.process() as p:
        first = p.weigh("1 B until the next granule begins", "alloc", 1)
        count, step = 1, 128
        while count < 1 << 16:
            more = p.weigh(f"{count + step} of 1 B", "many", 1, step, quiet=True)
            if more["result"] or more["weight"]:
                break
            count += step
        first["fill"] = [count, count + step if more["weight"] else None]
        p.weigh("all of 1 B freed", "free_all", quiet=True)
    found = fit(table.rows)
    for key in ("cost.granule", "cost.small_limit", "cost.small_unit"):
        t.measure(key, found.get(key, (None,))[0], "B")
    t.expect("cost.granule" in found, "charges have a common unit")
    worst = [(r["size"], r["weight"]) for r in table.rows if r.get("first") and not r["result"] and r["weight"] < r["size"]]
    t.expect(not worst, f"no allocation costs less than its bytes {worst}")
    unit, limit, piece = (f"{found[k][0]:,} B" if k in found else "(not found)"
                          for k in ("cost.granule", "cost.small_limit", "cost.small_unit"))
    t.answer(5, f"cuMemAlloc is charged in multiples of {unit}; requests below {limit} share them, in pieces of {piece}.")


def charged(named):
    """Formats the charge of each (name, row)."""
    out = []
    for name, row in named:
        if row["result"]:
            out.append(f"{name}: {row.get('error') or 'result %d' % row['result']}")
        else:
            process = "(not listed)" if row["process"] is None else f"{row['process']:,} B"
            out.append(f"{name}: {process} to the process and {row['device']:,} B of the device")
    return "; ".join(out)


ARRAYS = [("array 64 64 1 1", "64 x 64, one byte"), ("array 1000 1000 1 4", "1000 x 1000, four bytes"),
          ("array 1000 1000 0x10 4", "1000 x 1000, four halves"), ("array 1000 1000 0x20 1", "1000 x 1000, a float"),
          ("array 1024 1024 0x20 4", "1024 x 1024, four floats"), ("array 100000 0 0x20 1", "a line of 100,000 floats"),
          ("array3d 64 64 64 0x20 1", "64 x 64 x 64, a float"), ("array3d 100 100 10 0x20 4 1", "layered, 100 x 100 x 10"),
          ("mipmap 1024 1024 4 0x20 4", "mipmap of 1024 x 1024, 4 levels"),
          ("mipmap 1024 1024 11 1 4", "and 11 levels of bytes")]


@check("table.kinds", "what pitched memory, arrays of several formats, managed and pinned memory cost", "cupti.md 2.3",
       needs=NEEDS, seconds=240, questions=(6,))
def kinds(t):
    table, beside = Table(t), {}
    for width, height in ((1, 1), (1000, 1000), (70000, 100), (513, 4096)):
        table.weigh(f"pitch {width} x {height}", "pitch", width, height)
    for call, name in ARRAYS:
        table.weigh(name, *call.split())
    for name, call in (("managed, untouched", ("managed", 32 * MIB, 0)),
                       ("managed, touched by the host", ("managed", 32 * MIB, 1)),
                       ("managed, on the device", ("managed", 32 * MIB, 2)), ("pinned", ("pinned", 32 * MIB)),
                       ("registered", ("registered", 32 * MIB))):
        beside[name] = table.weigh(name, *call)
    t.answer(6, f"Of 32 MiB each NVML charges: {charged(beside.items())}.")


@check("table.handles", "what VMM handles, mappings, exports and imports, IPC and multicast cost, on either side",
       "cupti.md 2.3", needs=NEEDS, seconds=120, questions=(6,))
def handles(t):
    table, told = Table(t), []
    with table.process() as owner, table.process() as other:
        for units in (1, 3, 16):
            # The last one can be exported; where that is forbidden the others are measured all the same.
            made = owner.weigh(f"handle of {units} x 2 MiB", "vmm_create", units * 2 * MIB, int(units == 16), made=units)
        mapped = owner.weigh("mapped", "vmm_map", made.get("id", -1))
        shared = owner.driver.ask("vmm_export", made.get("id", -1))
        taken = other.weigh("imported elsewhere", "vmm_import", owner.driver.pid, shared["descriptor"], 32 * MIB)
        if not taken["result"]:
            told.append(("an imported handle", other.weigh("and mapped there", "vmm_map", taken["id"])))
        owner.weigh("released while mapped", "free", made.get("id", -1))
        owner.weigh("unmapped", "free", mapped.get("id", -1))
    with table.process() as owner, table.process() as other:
        memory = owner.weigh("64 MiB for another process", "alloc", 64 * MIB)
        shared = owner.driver.ask("ipc_get", memory["id"])
        told.append(("an IPC import of 64 MiB", other.weigh("opened there", "ipc_open", shared["handle"], 64 * MIB)))
        other.weigh("closed there", "free_all")
    told.append(("a multicast object with its memory", table.weigh("multicast of 2 MiB", "multicast", 2 * MIB)))
    t.answer(6, f"NVML charges: {charged(told)}.")


@check("table.pools", "growth step of a driver pool; memory released by trim and by synchronisation",
       "cupti.md 2.3", needs=NEEDS, seconds=180, questions=(7,))
def pools(t):
    table, reserved = Table(t), {}

    def state(p, pool=0):
        return p.driver.do("pool_state", pool)["reserved"]

    for size in (1, 65536, MIB, 2 * MIB + 1, 31 * MIB, 32 * MIB, 33 * MIB, 64 * MIB, 65 * MIB):
        with table.process() as p:
            row = p.weigh(f"{size:,} B out of the default pool", "async", size, size=size)
            row["reserved"] = reserved[size] = state(p)
    with table.process() as p:
        p.driver.do("pool_threshold", 0, 1 << 40)
        made = [p.weigh(f"threshold high: +{size:,} B", "async", size)["id"] for size in (64 * MIB, 64 * MIB)]
        p.weigh("one freed", "free", made[0])
        kept = p.weigh("synchronised", "sync")
        p.driver.do("pool_threshold", 0, 0)
        shrunk = p.weigh("threshold 0, synchronised", "sync")
        p.weigh("the other freed", "free", made[1])
        p.weigh("synchronised again", "sync")
        p.weigh("trimmed", "pool_trim", 0, 0)
        t.measure("reserved at the end", state(p), "B")
    with table.process() as p:
        pool = p.driver.do("pool_create")["pool"]
        row = p.weigh("1 B from a separate pool", "async", 1, pool)
        t.measure("reserved by it", state(p, pool), "B")
        p.weigh("freed", "free", row["id"])
        p.weigh("destroyed", "pool_destroy", pool)
    step = fit(table.rows).get("cuda.pool_step")
    t.expect(step, "a first allocation makes a pool grow")
    t.answer(7, f"A pool grows by {step[0] if step else 0:,} B ({step[1] if step else 'not found'}). Synchronising gave back "
                f"{-kept['weight']:,} B with a high release threshold and {-shrunk['weight']:,} B with 0.")


@check("table.contexts", "what the first context costs, the next ones, one without a primary, a green one", "cupti.md 3",
       needs=NEEDS, seconds=120)
def contexts(t):
    table = Table(t)
    with table.process(context=False) as p:
        p.weigh("primary, the first of the process", "context", context="first", facts=p.facts)
        for number in (1, 2):
            p.weigh(f"context {number} next to it", "context_new", context="next" if number == 1 else "more")
        for number in (1, 0):
            p.weigh(f"context {number + 1} destroyed", "context_destroy", number)
        p.weigh("primary released", "release")
    with table.process(context=False) as p:
        p.weigh("a separate context, the first of the process", "context_new")
        p.weigh("primary context next to it", "context")
    with table.process() as p:
        p.weigh("green", "green", context="green")
        p.weigh("green destroyed", "green_end")


@check("table.modules", "what modules cost, lazily and eagerly loaded, at their load and at their first launch", "cupti.md 3",
       needs=NEEDS, seconds=300, keys=("cuda.module_bytes=0", "cuda.lazy=1"))
def modules(t):
    table = Table(t)
    for loading in ("EAGER", "LAZY"):
        for name, words in (("empty", (0,)), ("1 MiB of globals", (MIB,)), ("4 MiB", (4 * MIB,)), ("16 MiB", (16 * MIB,)),
                            ("64 MiB", (64 * MIB,)), ("256 kernels of 4 KiB", (0, 0, 256))):
            with table.process(CUDA_MODULE_LOADING=loading) as p:
                to = p.driver.do("alloc", 2 * MIB)["id"]
                row = p.weigh(f"{name}, {loading}", "module", *words, loading=loading, loaded=words[0])
                p.weigh(f"{name}, {loading}, launched", "launch", row.get("id", -1), to, loading=loading)
                p.weigh(f"{name}, {loading}, unloaded", "module_unload", row.get("id", -1), loading=loading)
        with table.process(CUDA_MODULE_LOADING=loading) as p:
            made = [p.weigh(f"empty module {n}", "module", 0, quiet=True) for n in range(32)]
            sum_of = dict(made[-1], name=f"32 empty modules, {loading}", weight=sum(r["weight"] for r in made),
                          device=sum(r["device"] for r in made), modules=32, small=loading == "EAGER")
            table.rows.append(sum_of)
            t.measure(sum_of["name"], {"weight": sum_of["weight"], "device": sum_of["device"]}, "B")
    table.save()


@check("table.limits", "what stack, printf and heap limits cost: when set, with a module that uses them, with a launch",
       "cupti.md 3", needs=NEEDS, seconds=300, questions=(11,), keys=("cuda.module_bytes=0",))
def limits(t):
    table = Table(t)
    with table.process() as p:
        for which, kind in enumerate(("stack", "printf", "heap")):
            p.weigh(f"{kind} limit of a new context", "limit", which, default_of=kind, facts=p.facts)
    for which, kind, values, uses in ((0, "stack", (2048, 4096, 8192, 16384), 0), (1, "printf", (16 * MIB, 64 * MIB), 1),
                                      (2, "heap", (64 * MIB, 256 * MIB), 2)):
        for value in values:
            with table.process() as p:
                to = p.driver.do("alloc", 2 * MIB)["id"]
                of = {"limit_kind": kind, "limit": value}
                if p.weigh(f"{kind} limit {value:,}", "limit", which, value, **of, when="the limit")["result"]:
                    continue
                used = p.weigh(f"{kind} limit {value:,}, a module", "module", 0, 0, 0, uses, **of, when="a module")
                p.weigh(f"{kind} limit {value:,}, its launch", "launch", used.get("id", -1), to, **of, when="a launch")
    for uses, kind in ((1, "printf"), (2, "heap")):
        with table.process() as p:
            to = p.driver.do("alloc", 2 * MIB)["id"]
            used = p.weigh(f"a module that uses {kind}, default limit", "module", 0, 0, 0, uses)
            p.weigh(f"its launch, {kind}", "launch", used.get("id", -1), to)
    for local in (4096, 16384):
        with table.process() as p:
            to = p.driver.do("alloc", 2 * MIB)["id"]
            used = p.weigh(f"a kernel with {local:,} B of local memory", "module", 0, local)
            p.weigh(f"its launch, {local:,} B of local memory", "launch", used.get("id", -1), to,
                    model=local * p.facts["processors"] * p.facts["threads_per_processor"])
    found = fit(table.rows)
    said = {k: found[f"cost.{k}_percent"] for k in ("stack", "printf", "heap") if f"cost.{k}_percent" in found}
    t.expect(said, "a limit's cost can be measured")
    told = "; ".join(f"{kind}: {value} % of the model ({how})" for kind, (value, how) in said.items())
    t.answer(11, f"NVML charges {told}.")


@check("table.small", "what streams, events, executable graphs, captured memory and peer access cost", "cupti.md 3",
       needs=NEEDS, seconds=120, keys=("devices=2",))
def small(t):
    table = Table(t)
    for kind, command in (("stream", "streams"), ("event", "events")):
        with table.process() as p:
            p.weigh(f"100 {command}", command, 100, many=kind, each=100)
            p.weigh(f"{command} destroyed", f"{command}_end")
    with table.process() as p:
        to = p.driver.do("alloc", 2 * MIB)["id"]
        p.weigh("a first executable graph, and the stream for it", "graphs", to, 10, 1)
        p.weigh("100 more executable graphs of 10 nodes", "graphs", to, 10, 100, many="graph_exec", each=100)
        p.weigh("graphs destroyed", "graphs_end")
    with table.process() as p:
        p.weigh("a graph with a memory node of 48 MiB", "graph", 48 * MIB, 1)
        for step in ("launch", "launch", "destroy", "trim"):
            row = p.weigh(f"graph {step}", f"graph_{step}")
            row["graph_reserved"] = p.driver.do("graph_state")["reserved"]
    with table.process() as p:
        p.weigh("a captured allocation of 48 MiB, instantiated", "captured", 48 * MIB, 1)
        for step in ("launch", "destroy", "trim"):
            row = p.weigh(f"captured graph {step}", f"graph_{step}")
            row["graph_reserved"] = p.driver.do("graph_state")["reserved"]
    with table.process() as p:
        if p.facts["count"] > 1:
            p.weigh("peer access", "peer", 1, many="peer", each=1)
        else:
            t.note("one device: peer access cannot be weighed")
    table.save()


@check("table.costs", "the costs that follow, as the simulated GPU reads them", "DESIGN 7")
def costs(t):
    rows = [row for path in sorted((t.machine.work / "table").glob("*.json")) for row in json.loads(path.read_text())]
    if not rows:
        raise Skip("no check of the table ran")
    base = next((path for path in (BASE, t.machine.bin / "costs.txt") if path.exists()), None)
    if not base:
        raise Skip(f"{BASE} is missing: it lists the values to keep that were not measured")
    facts = t.nvml.facts()
    provenance = "simulated" if t.dry else f"measured on {facts['name']}, driver {facts['driver']}"
    found = fit(rows)
    text = write(base.read_text(), found, provenance)
    out = t.machine.work / "out"
    out.mkdir(exist_ok=True)
    (out / "costs.txt").write_text(text)
    (out / "table.json").write_text(json.dumps({"machine": facts, "dry": t.dry, "rows": rows}, indent=0))
    for key, (value, how) in parse(text).items():
        t.measure(key, value)
        if key not in found:
            t.note(f"{key} was not measured: {how}")
    t.measure("rows", len(rows))
    tool = t.machine.fake / "bin" / "fake-gpu"
    if tool.exists():
        again = subprocess.run([tool, "init", t.home / "again", f"costs={out / 'costs.txt'}"], capture_output=True,
                               text=True)
        t.expect(again.returncode == 0, f"the simulated GPU reads it {again.stderr}")
        shown = subprocess.run([tool, "show", t.home / "again"], capture_output=True, text=True).stdout
        missing = [k for k, (v, _) in parse(text).items()
                   if f"\n{k}={v}\n" not in shown and f"gpu0.{k}={v}\n" not in shown]
        t.expect(not missing, f"and has its values {missing}")
