"""What a process costs beside its allocations."""

from ..check import check
from ..stats import slope
from .common import GRANULE, MIB

AGENT = ("driver", "libgpumem.so")


@check("gap.context", "what a context costs, the first and the next", "cupti.md 3, DESIGN 1", needs=("driver",))
def context(t):
    d = t.driver()
    d.do("init")
    d.do("device", 0)
    t.measure("listed after cuInit", t.used(d.pid) is not None)
    total = t.nvml.memory()["used"]
    d.do("context")
    first = t.used(d.pid)
    t.measure("primary context", first, "B")
    t.measure("the device sees", t.nvml.memory()["used"] - total, "B")
    t.expect(first, f"the process is listed once it has a context ({first})")
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
        t.expect(not below, f"no event says less than the globals of its module {below}")
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
        # Whatever the module itself takes is no stack.
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
