"""Libraries other than PyTorch that take GPU memory: CuPy's pool, JAX's allocator, NCCL."""

from ..check import Skip, check
from ..machine import PROGRAMS
from .common import MIB, QUICK, becomes
from .gap import judge
from .pytorch import answer

DAEMON = ("libgpumem.so", "gpumemd")


def stages(t, daemon, p, prefix="", *, exact):
    """Reads the program's facts stage by stage until it ends; `reserved` is what the library has taken from the driver."""
    while True:
        facts = answer(p, 120)
        if "end" in facts:
            break
        reserved = facts["reserved"]
        if exact:
            row, fits = daemon.settled(p.pid, 15, tracked_bytes=reserved)
        else:
            becomes(lambda: ((daemon.row(p.pid) or {}).get("tracked_bytes") or 0) >= reserved, 15)
            row = daemon.row(p.pid)
            fits = row and (row.get("tracked_bytes") or 0) >= reserved
        tracked = row and row.get("tracked_bytes")
        used = t.used(p.pid)
        name = prefix + facts["stage"]
        t.measure(name, {"reserved": reserved, "allocated": facts["allocated"], "tracked": tracked, "used": used}, "B")
        t.expect(fits, f"{name}: tracked is {'' if exact else 'at least '}{reserved:,}, what the library has taken ({tracked})")
        p.say("")
    t.expect(p.wait() == 0, "the program ended well")
    return facts


@check("libs.cupy", "CuPy's memory pool: tracked is what the pool has taken", "frameworks.md", needs=DAEMON + ("cupy",), seconds=120)
def cupy(t):
    daemon = t.daemon(QUICK)
    p = t.program([t.machine.python, PROGRAMS / "cupy_pool.py"], agent=daemon)
    t.measure("version", stages(t, daemon, p, exact=True)["version"])
    daemon.stop()
    t.publish(daemon.recordings[-1], "libs-cupy", {"runs": [{"pid": p.pid}]})


@check("libs.jax", "JAX's allocator: tracked includes its pool, without and with preallocation", "frameworks.md",
       needs=DAEMON + ("jax",), seconds=240)
def jax(t):
    daemon, pids = t.daemon(QUICK), []
    for preallocate in ("false", "true"):
        # A tenth of the card is enough to see a pool that is taken at once.
        p = t.program([t.machine.python, PROGRAMS / "jax_alloc.py"], agent=daemon, XLA_PYTHON_CLIENT_PREALLOCATE=preallocate,
                      XLA_PYTHON_CLIENT_MEM_FRACTION="0.10")
        pids.append(p.pid)
        t.measure("version", stages(t, daemon, p, f"preallocate={preallocate}, ", exact=False)["version"])
    daemon.stop()
    t.publish(daemon.recordings[-1], "libs-jax", {"runs": [{"pid": pid} for pid in pids]})


@check("libs.nccl", "NCCL with one rank: its memory is tracked, or is an explained part of the gap", "DESIGN 8, frameworks.md",
       needs=DAEMON + ("torch", "real"), seconds=180)
def nccl(t):
    daemon = t.daemon(QUICK)
    p = t.program([t.machine.python, PROGRAMS / "torch_nccl.py", t.home / "rendezvous"], agent=daemon)
    tracked, readings = lambda: (daemon.row(p.pid) or {}).get("tracked_bytes") or 0, {}
    while True:
        facts = answer(p, 150)
        if "refused" in facts:
            raise Skip(facts["refused"])
        becomes(lambda: tracked() >= 64 * MIB, 15)  # the program's own tensor
        readings[facts["stage"]] = {"tracked": t.settled(tracked), "used": t.used(p.pid)}
        if "end" in facts:
            break
        p.say("")
    for name, reading in readings.items():
        t.measure(name, reading, "B")
    t.measure("NCCL", facts["nccl"])
    judge(t, daemon, p.pid)
    p.say("")
    t.expect(p.wait() == 0, "the program ended well")
    daemon.stop()
    t.publish(daemon.recordings[-1], "libs-nccl", {"runs": [{"pid": p.pid}]})
