"""Live memory in the program's own accounts, the agent's records, the daemon and NVML."""

import random
import time

from ..check import check
from .common import GRANULE, MIB, Watched, covered, rounding

AGENT = ("driver", "libgpumem.so")
DAEMON = AGENT + ("gpumemd",)


@check("live.random", "after any sequence of calls, good and refused, live bytes of each kind are the program's",
       "DESIGN 1, 4; cupti.md 1.5", needs=AGENT, seconds=120)
def sequence(t):
    path = t.recording()
    d = t.driver(agent=path)
    d.begin()
    draw, alive = random.Random(7), []
    take = [lambda: ("alloc", draw.choice([1, 512, 4096, 100000, MIB, 3 * MIB + 5, 16 * MIB])),
            lambda: ("pitch", draw.randint(1, 5000), draw.randint(1, 300)),
            lambda: ("pinned", draw.choice([4096, 2 * MIB])),
            lambda: ("registered", 65536 * draw.randint(1, 8)),
            lambda: ("managed", 2 * MIB, 0),
            lambda: ("vmm_create", 2 * MIB * draw.randint(1, 4))]
    for turn in range(t.times(600, 200)):
        if alive and draw.random() < 0.45:
            d.do("free", alive.pop(draw.randrange(len(alive))))
        elif draw.random() < 0.05:
            d.ask(*draw.choice([("free_wrong",), ("free_null",), ("fail", 1 << 50)]))
        else:
            answer = d.do(*draw.choice(take)())
            alive.append(answer["id"])
    books = d.books()
    d.finish()
    account = t.account(path)
    covered(t, account)
    sums = account.bytes_by_kind()
    sums["handle"] = sums.pop("vmm", 0)
    for kind in ("device", "pitched", "pinned", "registered", "managed", "handle"):
        t.expect(sums.get(kind, 0) == books[kind][1], f"{kind}: {books[kind][1]:,} ({sums.get(kind, 0):,})")
    t.measure("records", dict(account.counts))
    t.publish(path, "live-random", {"runs": [{"pid": d.pid, "tracked_bytes": d_tracked(books)}]})


def d_tracked(books):
    return sum(books[k][1] for k in ("device", "pitched", "array", "mipmap", "handle"))


@check("live.threads", "address reuse by racing threads never mis-books", "issue 3; cupti.md 1.5", needs=AGENT, seconds=150)
def threads(t):
    path = t.recording()
    d = t.driver(agent=path)
    d.begin()
    d.do("start", 4096, 20, 8)
    time.sleep(t.times(1.5, 0.3))
    loop = d.do("stop")
    left = d.tracked()
    d.finish()
    account = t.account(path)
    t.measure("steps", loop["steps"])
    t.measure("failed calls of the program", loop["failures"])
    t.measure("holes", account.holes)
    t.expect(loop["failures"] == 0, f"every call of the program succeeded ({loop['failures']})")
    if account.holes == 0 and account.lost == 0:
        t.expect(account.odd == 0, f"no record contradicts another ({account.odd})")
        t.expect(account.tracked() == left == 0, f"everything was given back ({account.tracked():,})")
    else:
        t.note("the ring was full: live memory then comes from the resync")


@check("live.join", "at each state, tracked + rounding is NVML's used within one 2 MiB granule",
       "DESIGN 8, accuracy on a GPU", needs=DAEMON, seconds=180)
def join(t):
    w = Watched(t)
    base = w.says("nothing allocated", 0)
    t.measure("used before the first allocation", base, "B")
    sizes, ids, worst, draw = [], [], 0, random.Random(3)
    plans = [[2 * MIB], [64 * MIB], [1], [4096] * 50, [3 * MIB + 1] * 4, [100 * MIB, 700000, 12345], None, None]
    for number, plan in enumerate(plans):
        if plan is None:
            for at in sorted(draw.sample(range(len(ids)), len(ids) // 2), reverse=True):
                w.driver.do("free", ids.pop(at))
                sizes.pop(at)
        else:
            for size in plan:
                ids.append(w.driver.do("alloc", size)["id"])
                sizes.append(size)
        used = w.says(f"state {number}", sum(sizes))
        if used is None or base is None:
            continue
        error = used - base - sum(sizes) - rounding(sizes)
        t.measure(f"state {number}", {"allocations": len(sizes), "tracked": sum(sizes), "rounding": rounding(sizes),
                                      "used": used - base, "error": error}, "B")
        worst = max(worst, abs(error))
    t.measure("largest error", worst, "B")
    t.expect(worst <= GRANULE, f"tracked + rounding is used within {GRANULE:,} ({worst:,})")
    w.driver.do("free_all")
    after = w.says("all freed", 0)
    if after is not None and base is not None:
        t.measure("used memory that remains after everything was freed", after - base, "B")
    w.end()
    w.daemon.stop()
    t.publish(w.daemon.recordings[-1], "live-join", {"runs": [{"pid": w.pid, "tracked_bytes": 0}]})


SIZES = [1, 256, 512, 4096, 65536, 131072, 262144, 524288, 3 * MIB // 4, MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB,
         2 * MIB + 1, 3 * MIB, 4 * MIB, 4 * MIB + 1, 8 * MIB, 16 * MIB, 20 * MIB, 32 * MIB, 64 * MIB]


@check("sizes.sweep", "what one cuMemAlloc of each size costs, and when the next granule begins",
       "cupti.md 2.3", needs=("driver",), seconds=120)
def sweep(t):
    d = t.driver()
    d.begin()
    table, late = {}, []
    for size in SIZES:
        before = t.used(d.pid)
        first = d.do("alloc", size)
        after = t.used(d.pid)
        row = {"first": after - before}
        count = 1
        if size < GRANULE:
            # Number that fit into the memory that the first one took.
            while count < 3 * (GRANULE // max(size, 512)) and count < 8192:
                step = max(1, min(256, GRANULE // max(size, 512) // 4))
                count += d.do("many", size, step)["count"]
                if t.used(d.pid) > after:
                    break
            row["until the next"] = count
        d.do("free_all")
        row["left after free"] = t.used(d.pid) - before
        table[f"{size:,}"] = row
        model = size + rounding([size])
        if not 0 <= row["first"] <= model:
            late.append((size, row["first"], model))
        del first
    for size, row in table.items():
        t.measure(f"{size} B", row, "B")
    t.expect(not late, f"no size costs more than its granules {late}")
    d.finish()


@check("sizes.many", "64 allocations of one size around the limit from which granules are not shared", "cupti.md 2.3",
       needs=("driver",), questions=(5,))
def many(t):
    d = t.driver()
    d.begin()
    d.do("alloc", 16 * MIB)  # what comes with a first allocation has come
    said = []
    for size in (MIB // 2, 3 * MIB // 4, MIB - 1, MIB, 3 * MIB // 2):
        before = t.used(d.pid)
        first = d.do("many", size, 64)["id"]
        # No piece lies across the border of two granules.
        taken, pieces = t.used(d.pid) - before, GRANULE // size if size <= MIB else 1
        model, shared = -(-64 // pieces) * GRANULE, 64 * size + rounding([size] * 64)
        for number in range(first, first + 64):
            d.do("free", number)
        t.measure(f"64 x {size:,} B", {"NVML": taken, "by whole pieces": model, "by the product's model": shared,
                                              "left after free": t.used(d.pid) - before}, "B")
        t.expect(abs(taken - model) <= GRANULE, f"64 x {size:,} B: {pieces} in a granule, {model:,} in all ({taken:,})")
        said.append(f"{taken // 64:,} B each of {size:,} B")
    t.answer(5, f"64 at a time: {', '.join(said)}.")
    d.finish()
