"""Kinds of memory: NVML's charge for each, and the category in which gpumemd counts it."""

from ..check import Skip, check
from .common import GRANULE, MIB, Watched, becomes

AGENT = ("driver", "libgpumem.so")
DAEMON = AGENT + ("gpumemd",)


@check("kinds.managed", "managed memory is outside the sum; NVML charges it to no process", "cupti.md 2.3, nvml.md 1.5",
       needs=DAEMON)
def managed(t):
    w = Watched(t)
    base, total = w.says("before", 0), t.nvml.memory()["used"]
    for touched, name in ((0, "untouched"), (1, "touched by the host"), (2, "on the device")):
        # Small: a program that takes more managed memory than the card has free can hang it.
        answer = w.driver.ask("managed", 32 * MIB, touched)
        if answer["result"]:
            t.note(f"{name}: result {answer['result']}")
            continue
        used = w.says(f"32 MiB {name}", 0)
        t.measure(f"used by the process, {name}", used - base, "B")
        t.measure(f"used of the device, {name}", t.nvml.memory()["used"] - total, "B")
        w.driver.do("free", answer["id"])
    w.end()


@check("kinds.pinned", "host memory, pinned or registered, is outside the sum", "cupti.md 2.3", needs=DAEMON)
def pinned(t):
    w = Watched(t)
    base = w.says("before", 0)
    w.driver.do("pinned", 64 * MIB)
    t.measure("used after 64 MiB pinned", w.says("pinned", 0) - base, "B")
    w.driver.do("registered", 64 * MIB)
    t.measure("used after 64 MiB registered", w.says("registered", 0) - base, "B")
    for kind in ("pinned_bytes", "registered_bytes"):
        told = lambda: [d["beside"][kind] for run in w.daemon.runs(w.pid) for d in run["devices"]]
        t.expect(becomes(lambda: told() == [64 * MIB]), f"{kind} is 64 MiB outside the sum ({told()})")
    w.end()


@check("kinds.vmm", "a handle costs from its creation until both its releases and its mappings are gone",
       "cupti.md 2.3, traps 8", needs=DAEMON)
def vmm(t):
    w = Watched(t)
    base, size, d = w.says("before", 0), 32 * MIB, w.driver
    steps = []

    def step(name, tracked):
        used = w.says(name, tracked)
        steps.append((name, used - base))
        t.expect(abs(used - base - tracked) <= GRANULE, f"{name}: NVML charges {tracked:,} ({used - base:,})")

    one = d.do("vmm_create", size)["id"]
    step("created", size)
    map1 = d.do("vmm_map", one)["id"]
    step("mapped", size)
    d.do("free", one)
    step("released while mapped", size)
    d.do("free", map1)
    step("unmapped after that", 0)
    two = d.do("vmm_create", size)["id"]
    map2 = d.do("vmm_map", two)["id"]
    d.do("free", map2)
    step("unmapped, not released", size)
    d.do("free", two)
    step("released after that", 0)
    three = d.do("vmm_create", size)["id"]
    map3 = d.do("vmm_map", three)["id"]
    again = d.do("vmm_retain", map3)["id"]
    d.do("free", map3)
    d.do("free", three)
    step("unmapped, released once of two", size)
    d.do("free", again)
    step("released twice", 0)
    t.measure("used", dict(steps), "B")
    w.end()
    w.daemon.stop()
    t.publish(w.daemon.recordings[-1], "kinds-vmm",
              {"runs": [{"pid": w.pid, "tracked_bytes": 0, "peak_tracked_bytes": size}]})


@check("kinds.ipc", "memory of another process costs its owner; the importer shows it beside", "cupti.md 2.3, nvml.md 1.5",
       needs=DAEMON, seconds=90)
def ipc(t):
    owner = Watched(t)
    other = t.driver(agent=owner.daemon)
    other.begin()
    base, total = owner.says("owner before", 0), t.device_used()
    memory = owner.driver.do("alloc", 64 * MIB)["id"]
    shared = owner.driver.do("ipc_get", memory)["handle"]
    charges(t, "the owner, exported", owner.says("exported", 64 * MIB) - base, 64 * MIB)
    other_base = t.used(other.pid)
    opened = other.ask("ipc_open", shared, 64 * MIB)
    if not t.expect(opened["result"] == 0, f"the importer opens it (result {opened['result']})"):
        return
    charges(t, "the importer, opened", t.used(other.pid) - other_base, 0)
    charges(t, "the owner, opened elsewhere", owner.says("opened elsewhere", 64 * MIB) - base, 64 * MIB)
    charges(t, "the device", t.device_used() - total, 64 * MIB)
    row, fits = owner.daemon.settled(other.pid, tracked_bytes=0)
    t.expect(fits, f"the importer's tracked stays 0 ({row and row.get('tracked_bytes')})")
    other.do("free", opened["id"])
    charges(t, "the importer, closed", t.used(other.pid) - other_base, 0)
    owner.driver.do("free", memory)
    charges(t, "the owner, freed", owner.says("freed", 0) - base, 0)
    other.finish()
    owner.end()


def charges(t, whom, bytes, expected):
    """Expects NVML's bytes within one granule, which allows for a mapping's page tables."""
    t.measure(whom, bytes, "B")
    t.expect(abs(bytes - expected) <= GRANULE, f"{whom}: NVML charges {expected:,} ({bytes:,})")


@check("kinds.handles", "a handle that another process imports and maps costs its maker only", "cupti.md 2.3",
       needs=DAEMON, seconds=90)
def handles(t):
    owner = Watched(t)
    other = t.driver(agent=owner.daemon)
    other.begin()
    base, size = owner.says("owner before", 0), 32 * MIB
    made = owner.driver.do("vmm_create", size, 1)["id"]
    shared = owner.driver.do("vmm_export", made)["descriptor"]
    charges(t, "the owner, exported", owner.says("exported", size) - base, size)
    other_base = t.used(other.pid)
    answer = other.ask("vmm_import", owner.pid, shared, size)
    if answer["result"]:
        raise Skip(f"the importer cannot: {answer}")
    mapped = other.do("vmm_map", answer["id"])["id"]
    charges(t, "the importer, mapped", t.used(other.pid) - other_base, 0)
    charges(t, "the owner, mapped elsewhere", owner.says("mapped elsewhere", size) - base, size)
    row, fits = owner.daemon.settled(other.pid, tracked_bytes=0)
    t.expect(fits, f"the importer's tracked stays 0 ({row and row.get('tracked_bytes')})")
    owner.driver.do("free", made)
    t.measure("the owner, released", t.used(owner.pid) - base, "B")
    other_base = t.used(other.pid)
    other.do("free", mapped)
    other.do("free", answer["id"])
    t.measure("the importer, unmapped and released", t.used(other.pid) - other_base, "B")
    owner.driver.do("vmm_close", shared)
    charges(t, "the owner, released everywhere and closed", owner_settles(owner) - base, 0)
    other.finish()
    owner.end()


def owner_settles(w):
    """Makes a call in which the driver can notice a closed descriptor, and expects no remaining memory."""
    w.driver.do("free", w.driver.do("alloc", 1)["id"])
    return w.says("nothing left", 0)


@check("kinds.exported", "an exported handle after its release, and after the descriptor is closed", "cupti.md 2.3",
       needs=DAEMON, questions=(17,))
def exported(t):
    w = Watched(t)
    base, size, d = w.says("before", 0), 32 * MIB, w.driver
    made = d.do("vmm_create", size, 1)["id"]
    answer = d.ask("vmm_export", made)
    if answer["result"]:
        raise Skip(f"cuMemExportToShareableHandle: {answer['result']}")
    charges(t, "exported", w.says("exported", size) - base, size)
    d.do("free", made)
    held = w.used() - base
    t.measure("released, the descriptor open", held, "B")
    # A later allocation at the daemon shows that it has received the release.
    after_it = d.do("alloc", MIB)["id"]
    tracked = lambda: (w.daemon.row(w.pid) or {}).get("tracked_bytes")
    t.expect(becomes(lambda: tracked() in (MIB, size + MIB)), f"tracked has the handle or not, and 1 MiB more ({tracked()})")
    t.measure("tracked then", (tracked() or 0) - MIB, "B")
    d.do("free", after_it)
    d.do("vmm_close", answer["descriptor"])
    after = owner_settles(w) - base
    charges(t, "closed", after, 0)
    t.answer(17, f"Of {size:,} B the exporter is charged {held:,} B after cuMemRelease and {after:,} B when the descriptor is "
                 "closed as well.")
    w.end()


@check("kinds.arrays", "pitched memory and arrays are one record each; inner calls are not booked twice",
       "cupti.md 2.3", needs=AGENT, questions=(3,))
def arrays(t):
    path = t.recording()
    d = t.driver(agent=path)
    d.begin()
    calls = [("pitch", 1000, 1000), ("array", 1024, 1024), ("array3d", 128, 128, 32), ("mipmap", 1024, 1024, 4)]
    for call in calls:
        before = t.used(d.pid)
        answer = d.ask(*call)
        t.measure(" ".join(map(str, call)), {"result": answer["result"], "by shape": answer.get("bytes"),
                                             "NVML": t.used(d.pid) - before}, "B")
    d.finish()
    account = t.account(path)
    t.answer(3, f"cuMemAllocPitch, cuArrayCreate, cuArray3DCreate and cuMipmappedArrayCreate, called once each, make "
                f"{account.counts['AllocEnd']} records.")
    t.expect(account.counts["AllocEnd"] == len(calls), f"{len(calls)} records ({account.counts['AllocEnd']})")
    sums = account.bytes_by_kind()
    t.expect(sums.get("device", 0) == 0, f"none of them a plain allocation ({sums})")
    t.measure("by the agent", sums, "B")


@check("kinds.reset", "cuDevicePrimaryCtxReset gives everything back without a free", "cupti.md 2.3", needs=DAEMON)
def reset(t):
    w = Watched(t)
    base = w.says("before", 0)
    w.driver.do("many", MIB, 16)
    w.driver.do("vmm_create", 4 * MIB)
    w.says("allocated", 20 * MIB)
    w.driver.do("reset")
    # The context may be gone from NVML's list now; a new one begins with the next call that needs it.
    row, fits = w.daemon.settled(w.pid, tracked_bytes=0)
    t.measure("row after the reset", row)
    w.driver.do("context")
    w.driver.do("alloc", 3 * MIB)
    used = w.says("allocated anew", 3 * MIB)
    t.measure("used against before", used - base, "B")
    w.end()


@check("kinds.contexts", "destroying a separate context frees its memory", "cupti.md 2.3", needs=DAEMON)
def contexts(t):
    w = Watched(t)
    base = w.says("before", 0)
    w.driver.do("alloc", 4 * MIB)
    made = w.driver.do("context_new")["id"]
    w.driver.do("many", 2 * MIB, 8)
    t.measure("a second context with 16 MiB", w.says("in a second context", 20 * MIB) - base, "B")
    w.driver.do("context_destroy", made)
    t.measure("after its end", w.says("its end", 4 * MIB) - base, "B")
    w.end()
