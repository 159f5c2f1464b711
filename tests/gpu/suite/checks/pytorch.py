"""Unmodified PyTorch: its three allocators, its profiler, and a training step's cost with the agent."""

import json

from ..check import check
from ..machine import PROGRAMS
from ..stats import paired, summary
from .common import MIB, QUICK, becomes
from .cost import in_turns

TORCH = ("torch", "libgpumem.so")
DAEMON = TORCH + ("gpumemd",)
BACKENDS = {"caching": "backend:native", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}


def start(t, script, *words, agent=None, allocator="caching", **more):
    both = {name: BACKENDS[allocator] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    return t.program([t.machine.python, PROGRAMS / script, *words], agent=agent, **both, **more)


def answer(p, timeout=240):
    """Returns the program's next JSON line; skips other lines, which libraries print."""
    while True:
        line = p.line(timeout)
        if line.startswith("{"):
            return json.loads(line)


def allocator(t, name):
    daemon = t.daemon(QUICK)
    p = start(t, "torch_alloc.py", agent=daemon, allocator=name)
    first = answer(p)
    t.expect(first["agent"], "the agent is in the process")
    p.say("")
    for number in range(4):
        facts = answer(p)
        reserved = facts["reserved"]
        # Libraries allocate outside of torch once there is work; before that every byte is torch's.
        exact = number < 2
        if exact:
            row, fits = daemon.settled(p.pid, 15, tracked_bytes=reserved)
        else:
            becomes(lambda: ((daemon.row(p.pid) or {}).get("tracked_bytes") or 0) >= reserved, 15)
            row = daemon.row(p.pid)
        tracked = row and row.get("tracked_bytes")
        used = t.used(p.pid)
        t.measure(facts["stage"], {"torch reserved": reserved, "torch allocated": facts["allocated"],
                                   "tracked": tracked, "used": used, "gap": used - tracked if tracked is not None
                                   and used else None}, "B")
        if exact:
            t.expect(fits, f"{facts['stage']}: tracked is what torch has reserved, {reserved:,} ({tracked})")
        elif tracked is not None:
            t.expect(tracked >= reserved, f"{facts['stage']}: tracked holds what torch has reserved ({tracked:,})")
        if number == 0:
            t.measure("torch", facts["version"])
            t.measure("backend", facts["backend"])
        p.say("")
    t.expect(p.wait() == 0, "the program ended well")
    runs = daemon.runs(p.pid)
    cells = runs[0]["cells"] if runs else []
    t.measure("tags in its run", sorted({c["tag"] for c in cells if c["tag"]}))
    t.measure("libraries in its run", sorted({c["library"] for c in cells if c["library"]}))
    daemon.stop()
    t.publish(daemon.recordings[-1], f"torch-{name}", {"runs": [{"pid": p.pid}]})


@check("torch.caching", "PyTorch with its caching allocator: tracked is what torch has reserved",
       "DESIGN 4, frameworks.md 2.2", needs=DAEMON, seconds=150)
def caching(t):
    allocator(t, "caching")


@check("torch.expandable", "with expandable segments (handles and mappings)", "traps 8, frameworks.md 2.2", needs=DAEMON,
       seconds=150)
def expandable(t):
    allocator(t, "expandable")


@check("torch.async", "with cudaMallocAsync (a driver pool)", "traps 8, frameworks.md 2.2", needs=DAEMON, seconds=150)
def malloc_async(t):
    allocator(t, "async")


@check("torch.without_agent", "the same program without the agent runs the same", "DESIGN 4", needs=("torch",), seconds=150)
def without(t):
    p = start(t, "torch_alloc.py")
    first = answer(p)
    t.expect(not first["agent"], "no agent")
    p.say("")
    for _ in range(4):
        facts = answer(p)
        t.measure(facts["stage"], {"reserved": facts["reserved"], "used": t.used(p.pid)}, "B")
        p.say("")
    t.expect(p.wait() == 0, "it ended well")


def slowdown(t, name, *words):
    daemon = t.daemon()
    p = start(t, "torch_train.py", *words, agent=daemon, allocator=name)
    facts = answer(p, 280)
    t.expect(facts["pausable"], "the agent can be paused and resumed")
    blocks = facts["blocks"]
    t.measure("step, agent paused", {k: v * 1e3 if k != "n" else v for k, v in summary(blocks["off"]).items()}, "ms")
    for arm, text in (("on", "with the agent"), ("history", "with torch's memory history, Python stacks"),
                      ("history_all", "with torch's memory history, all stacks"), ("off2", "control: off again")):
        if blocks.get(arm) and len(blocks[arm]) == len(blocks["off"]):
            t.measure(text, paired(blocks["off"], blocks[arm]), "s a step")
    for arm, why in facts["refused"].items():
        t.note(f"{arm}: {why}")
    p.wait()
    return paired(blocks["off"], blocks["on"])


@check("torch.slowdown", "a training step with the agent: at most 0.5 % slower, beside torch's own memory history",
       "DESIGN 8", needs=DAEMON, seconds=300)
def train(t):
    found = slowdown(t, "caching")
    t.expect(found["percent"] <= 0.5, f"{found['percent']:.2f} % slower (95 %: {found['percent_95']})")


@check("torch.slowdown_small", "the worst case: tiny steps that only the CPU limits", "DESIGN 8", needs=DAEMON,
       seconds=300)
def train_small(t):
    slowdown(t, "caching", "--width", "128", "--layers", "12", "--batch", "2", "--steps", "20", "--rounds", "16")


@check("torch.slowdown_async", "every tensor is a driver call: cudaMallocAsync", "DESIGN 8", needs=DAEMON, seconds=300)
def train_async(t):
    slowdown(t, "async", "--rounds", "12", "--arms", "off,on,off2")


@check("torch.processes", "training in processes with and without the agent, in turns", "DESIGN 8", needs=DAEMON,
       seconds=300)
def train_processes(t):
    daemon = t.daemon()

    def one(with_agent):
        p = start(t, "torch_train.py", "--rounds", "6", "--arms", "on", agent=daemon if with_agent else None)
        facts = answer(p, 200)
        p.wait()
        return summary(facts["blocks"]["on"])["p50"]

    found = paired(*in_turns(t, 4, one))
    t.measure("a step", found, "s")


def profiler(t, how, agent=True, **more):
    path = t.recording(f"profile-{how}-{len(more)}")
    p = start(t, "torch_profile.py", how, agent=path if agent else None, **more)
    facts = answer(p)
    t.expect(p.wait() == 0, "the program ended well")
    return facts, (t.account(path) if agent else None)


@check("torch.profiler", "torch.profiler and the agent: a lost subscription is reported, not hidden", "cupti.md 5, traps 15", needs=TORCH,
       seconds=240, questions=(9,))
def profile(t):
    plain, _ = profiler(t, "plain", agent=False)
    t.measure("kernels that the profiler sees alone", plain["kernels"])
    t.measure("torch", plain["version"])
    for name, how, more in (("with the agent", "plain", {}), ("with the agent paused meanwhile", "pause", {}),
                            ("with KINETO_USE_DAEMON=1", "plain", {"KINETO_USE_DAEMON": 1})):
        facts, account = profiler(t, how, **more)
        states = [(s, r) for s, r, _ in account.states]
        t.answer(9, f"{name}: the profiler sees {facts['kernels']} kernels of {plain['kernels']}, the agent "
                    f"{account.tracked():,} B of {facts['reserved']:,} and reports {', '.join(s for s, _ in states)}.")
        seen = account.tracked() >= facts["reserved"] - 64 * MIB
        t.measure(name, {"kernels": facts["kernels"], "agent's states": states, "tracked": account.tracked(),
                         "torch reserved": facts["reserved"]})
        told = {s for s, _ in states} & {"blocked", "disarmed", "late", "paused"}
        t.expect(seen or told, f"{name}: the agent sees everything, or reports that it does not ({states})")


@check("torch.trace_teardown", "TEARDOWN_CUPTI=1, with which torch finalises CUPTI for all clients: reported, not hidden",
       "cupti.md 5.2", needs=TORCH, seconds=120, questions=(12,))
def teardown(t):
    facts, account = profiler(t, "plain", TEARDOWN_CUPTI=1)
    states = [state for state, _, _ in account.states]
    t.measure("states", account.states)
    t.measure("tracked", account.tracked(), "B")
    t.measure("torch reserved", facts["reserved"], "B")
    t.answer(12, f"After torch's TEARDOWN_CUPTI=1 the agent has {account.tracked():,} B of {facts['reserved']:,} and reported "
                 f"{', '.join(states)}.")
    t.expect(states[:1] == ["covered"], f"covered at first ({states})")
    t.expect(account.tracked() >= facts["reserved"] - 64 * MIB or set(states) - {"covered"},
             f"the agent sees everything, or reports that it does not ({states})")
