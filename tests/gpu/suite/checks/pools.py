"""Driver pools: a pool costs the memory that it has reserved."""

from ..check import check
from .common import GRANULE, MIB, Watched

DAEMON = ("driver", "libgpumem.so", "gpumemd")
# Longer than the interval between polls of a pool's own numbers (reference/cupti.md 2.3: 1 s).
POLL_S = 5


@check("pools.default", "a driver pool counts with its reserved memory, and shrinks without an event", "cupti.md 2.3",
       needs=DAEMON, seconds=90)
def default(t):
    w = Watched(t)
    base, d, grown = w.says("before", 0), w.driver, []

    def step(name):
        state = d.do("pool_state", 0)
        used = w.says(name, state["reserved"], POLL_S + 5)
        grown.append({"step": name, "reserved": state["reserved"], "used": state["used"], "NVML": used - base})
        t.expect(abs(used - base - state["reserved"]) <= GRANULE,
                 f"{name}: NVML charges the reserved bytes ({used - base:,} and {state['reserved']:,})")
        return state

    d.do("pool_threshold", 0, 1 << 40)
    ids = []
    for size in (1, 4096, MIB, 2 * MIB, 33 * MIB, 64 * MIB):
        ids.append(d.do("async", size)["id"])
        d.do("sync")
        step(f"+{size:,}")
    for id in ids:
        d.do("free", id)
    d.do("sync")
    kept = step("freed, threshold high")
    t.expect(kept["reserved"] > 0, "with a high threshold the pool keeps its memory")
    d.do("pool_threshold", 0, 0)
    d.do("async", 4096)
    d.do("sync")
    step("threshold 0, synchronised")
    d.do("free_all")
    d.do("sync")
    step("freed, synchronised")
    d.do("pool_trim", 0, 0)
    end = step("trimmed")
    t.expect(end["reserved"] == 0, f"a trimmed empty pool has nothing ({end['reserved']:,})")
    t.measure("steps", grown, "B")
    w.end()
    w.daemon.stop()
    t.publish(w.daemon.recordings[-1], "pools-default", {"runs": [{"pid": w.pid, "tracked_bytes": 0}]})


@check("pools.own", "a pool of the program's own, and its end with memory in it", "cupti.md 2.3", needs=DAEMON)
def own(t):
    w = Watched(t)
    base, d = w.says("before", 0), w.driver
    pool = d.do("pool_create")["pool"]
    one = d.do("async", 20 * MIB, pool)["id"]
    d.do("sync")
    state = d.do("pool_state", pool)
    used = w.says("20 MiB in it", state["reserved"], POLL_S + 5)
    t.measure("reserved for 20 MiB", state["reserved"], "B")
    t.measure("NVML", used - base, "B")
    d.do("free", one)
    d.do("sync")
    d.do("pool_destroy", pool)
    d.do("sync")
    used = w.says("destroyed", 0, POLL_S + 5)
    t.measure("NVML after its end", used - base, "B")
    w.end()


@check("pools.graphs", "memory nodes of graphs cost what the graph pool has reserved", "cupti.md 2.3", needs=DAEMON)
def graphs(t):
    w = Watched(t)
    base, d, steps = w.says("before", 0), w.driver, []

    def step(name):
        state = d.do("graph_state")
        used = w.says(name, state["reserved"], POLL_S + 5)
        steps.append({"step": name, "reserved": state["reserved"], "used": state["used"], "NVML": used - base})

    d.do("graph", 48 * MIB, 1)
    step("instantiated")
    d.do("graph_launch")
    step("launched")
    d.do("graph_launch")
    step("again")
    d.do("graph_destroy")
    step("destroyed")
    d.do("graph_trim")
    step("trimmed")
    t.measure("steps", steps, "B")
    w.end()


@check("pools.graph_paused", "a graph with a memory node, made while the agent listens, is replayed while it is paused and after",
       "cupti.md 2.3, 5.4", needs=DAEMON)
def graph_paused(t):
    w = Watched(t)
    base, d, steps = w.says("before", 0), w.driver, []

    def replay(name, tracked=0):
        for _ in range(3):
            d.do("graph_launch")
        state = d.do("graph_state")
        used = w.says(name, state["reserved"] + tracked, POLL_S + 5) if tracked is not None else w.used()
        steps.append({"step": name, "reserved": state["reserved"], "NVML": used - base})

    d.do("graph", 48 * MIB, 1)
    replay("before the pause")
    d.do("pause")
    replay("while paused", None)
    hidden = d.do("alloc", 6 * MIB)["id"]
    d.do("resume")
    d.do("free", hidden)
    d.do("alloc", 3 * MIB)
    replay("after the pause", 3 * MIB)
    d.do("graph_destroy")
    d.do("graph_trim")
    t.expect(d.do("graph_state")["reserved"] == 0, "a trimmed graph pool has nothing")
    w.says("destroyed and trimmed", 3 * MIB, POLL_S + 5)
    t.measure("steps", steps, "B")
    w.end()


@check("pools.capture", "a stream-ordered allocation under capture is the graph's, not the process's",
       "cupti.md 2.3", needs=("driver", "libgpumem.so"), questions=(4,))
def capture(t):
    path = t.recording()
    d = t.driver(agent=path)
    d.begin()
    answer = d.ask("captured", 16 * MIB)
    t.measure("result", answer["result"])
    t.expect(answer["result"] == 0, f"the capture works ({answer['result']})")
    d.finish()
    account = t.account(path)
    left = account.bytes_by_kind()
    t.measure("alive by the agent", left, "B")
    booked = account.tracked()
    t.answer(4, "A captured cuMemAllocAsync is not booked: the node's callback came inside the call." if not booked else
             f"A captured cuMemAllocAsync is booked as {booked:,} B: the node's callback did not come inside the call.")
    t.expect(account.tracked() == 0, f"nothing is booked ({account.tracked():,})")
