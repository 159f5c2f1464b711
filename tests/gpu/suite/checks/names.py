"""Unmodified PyTorch without calls to gpumem: the module and role of each block."""

from ..check import check
from .common import MIB, QUICK, becomes
from .pytorch import DAEMON, answer, start

ROLES = {"parameters": "parameter", "gradients": "gradient", "state": "optimizer state"}


def pool(daemon, pid):
    """The run so far, and PyTorch's pool in it."""
    runs = daemon.runs(pid)
    pools = [p for d in (runs[0]["devices"] if runs else []) for p in d["details"].get("pools", []) if p["name"] == "torch"]
    return (runs[0] if runs else None), (pools[0] if pools else None)


def totals(daemon, pid):
    """Bytes of live blocks and of segments."""
    torch = pool(daemon, pid)[1] or {}
    return torch.get("block_bytes"), torch.get("segment_bytes")


def by_role(run):
    found = {}
    for device in run["devices"]:
        for cell, bytes in (device.get("last") or {}).get("amounts", []):
            cell = run["cells"][cell]
            if cell["class"] == "block":
                found[cell["role"]] = found.get(cell["role"], 0) + bytes
    return found


def named(run):
    """Returns the tagged percentage of the bytes of forward and backward blocks at the peak."""
    amounts = [(run["cells"][c], b) for d in run["devices"] for c, b in (d.get("peak") or {}).get("amounts", [])]
    blocks = [(c, b) for c, b in amounts if c["class"] == "block" and c["phase"] in ("forward", "backward")]
    return 100 * sum(b for c, b in blocks if c["tag"]) / max(1, sum(b for _, b in blocks))


def names(t, model, *words, least, allocator="caching"):
    daemon = t.daemon(QUICK)
    # No kernels are made for the simulated GPU.
    small = ("--small", "--backend", "aot_eager") if t.dry else ()
    p = start(t, "torch_names.py", model, *words, *small, agent=daemon, allocator=allocator)
    for number in range(4):
        facts = answer(p)
        wanted = (facts["allocated"], facts["reserved"])
        becomes(lambda: totals(daemon, p.pid) == wanted, 15)
        found = totals(daemon, p.pid)
        t.expect(found == wanted, f"step {number}: live blocks and segments are {wanted}, as in torch ({found})")
        if number == 3:
            # Up to 1 MiB that is left over of a block is not split off. Roles are those of the last reading.
            bounds = {role: (facts[what][0], facts[what][0] + facts[what][1] * MIB) for what, role in ROLES.items()}
            fits = lambda roles: all(low <= roles.get(role, 0) <= high for role, (low, high) in bounds.items())
            becomes(lambda: fits(by_role(pool(daemon, p.pid)[0])), 15)
            roles = by_role(pool(daemon, p.pid)[0])
            t.expect(fits(roles), f"roles are within {bounds} ({roles})")
            t.measure("roles", {role or "unknown": bytes for role, bytes in roles.items()}, "B")
        p.say("")
    t.expect(p.wait() == 0, "the program ended well")
    run, _ = pool(daemon, p.pid)
    layers = {said["layer"]: said["state"] for said in run["coverage"]["layers"]}
    t.measure("layers", layers)
    share = named(run)
    t.measure("forward and backward at the peak, with a name", share, "%")
    t.expect(share >= least, f"{share:.2f} % of the bytes at the peak are named, {least} % wanted")
    tags = {c["tag"] for c in run["cells"] if c["tag"]}
    t.expect(any(tag.startswith(facts["model"] + "/") for tag in tags), f"names begin with {facts['model']}/ ({sorted(tags)[:5]})")
    t.measure("torch", facts["version"])
    daemon.stop()
    t.publish(daemon.recordings[-1], f"names-{model}{''.join(words)}-{allocator}", {"runs": [{"pid": p.pid}]})


@check("torch.names_gpt", "a GPT-2 in training: blocks to the byte, roles complete, names", "DESIGN 4, 7", needs=DAEMON,
       seconds=240)
def gpt(t):
    names(t, "gpt", least=99)


@check("torch.names_gpt_expandable", "the same with expandable segments", "frameworks.md 2.2", needs=DAEMON, seconds=240)
def gpt_expandable(t):
    names(t, "gpt", least=99, allocator="expandable")


@check("torch.names_resnet", "a ResNet-50 in training", "frameworks.md 3", needs=DAEMON, seconds=240)
def resnet(t):
    names(t, "resnet", least=99)


@check("torch.names_gpt_compiled", "the GPT-2, its blocks compiled", "frameworks.md 3.4", needs=DAEMON, seconds=300)
def gpt_compiled(t):
    names(t, "gpt", "--compiled", least=95)


@check("torch.names_resnet_compiled", "the ResNet-50, its blocks compiled", "frameworks.md 3.4", needs=DAEMON, seconds=300)
def resnet_compiled(t):
    names(t, "resnet", "--compiled", least=95)


@check("torch.names_profiled", "torch.profiler inside the run: blocks stay exact, or the report lists the gaps", "traps 15",
       needs=DAEMON, seconds=240)
def profiled(t):
    daemon = t.daemon(QUICK)
    p = start(t, "torch_names.py", "gpt", "--profiled", *(("--small",) if t.dry else ()), agent=daemon)
    for number in range(4):
        facts = answer(p)
        wanted = (facts["allocated"], facts["reserved"])
        becomes(lambda: totals(daemon, p.pid) == wanted, 10)
        flags = (daemon.row(p.pid) or {"flags": []})["flags"]
        found = totals(daemon, p.pid)
        t.measure(f"step {number}", {"flags": flags, "blocks, segments": found, "torch": wanted})
        t.expect(found == wanted or set(flags) - {"covered"}, f"step {number}: exact, or reported ({flags})")
        p.say("")
    t.expect(p.wait() == 0, "the program ended well")
