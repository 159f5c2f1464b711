"""Effects on the program, and on the correctness of figures, when a process dies or stops."""

import signal
import time

from ..check import Skip, check
from ..daemon import Daemon
from ..programs import until
from ..wire import read
from .common import MIB, QUICK, Watched

DAEMON = ("driver", "libgpumem.so", "gpumemd")


@check("faults.daemon_killed", "kill -9 of the daemon and a restart mid-run: the program does not notice, the sums return",
       "DESIGN 4, issue 3", needs=DAEMON, seconds=120)
def daemon_killed(t):
    w = Watched(t)
    d = w.driver
    d.do("many", 4 * MIB, 5)
    w.says("before", 20 * MIB)
    d.do("start", 65536, 3000, 2)
    time.sleep(t.times(3, 1))
    quiet = d.do("stop")
    d.do("start", 65536, 3000, 2)
    w.daemon.program.kill()
    time.sleep(t.times(3, 1))
    d.do("alloc", 7 * MIB)
    w.daemon.start()
    time.sleep(t.times(8, 2))
    loop = d.do("stop")
    t.measure("steps", loop["steps"])
    t.measure("step before", {k: quiet[k] for k in ("p50_us", "p99_us", "worst_ns")})
    t.measure("step around the kill", {k: loop[k] for k in ("p50_us", "p99_us", "worst_ns", "slow")})
    t.expect(loop["failures"] == 0, f"no call of the program failed ({loop['failures']})")
    t.expect(loop["worst_ns"] < 1e9, f"no call waited for a daemon ({loop['worst_ns'] / 1e6:.1f} ms at worst)")
    began = time.monotonic()
    w.says("after the restart", 27 * MIB, 20)
    t.measure("until the sums were right again", time.monotonic() - began, "s")
    row = w.daemon.row(w.pid)
    t.expect(row and "covered" in row["flags"], f"it is covered again ({row and row['flags']})")
    w.end()
    w.daemon.stop()
    t.publish(w.daemon.recordings[-1], "faults-daemon-killed", {"runs": [{"pid": w.pid, "tracked_bytes": 27 * MIB}]})


@check("faults.daemon_stopped", "SIGSTOP of the daemon: no call of the program stalls, and the sums return",
       "DESIGN 4, issue 3", needs=DAEMON, seconds=120)
def daemon_stopped(t):
    w = Watched(t)
    d, stop_s = w.driver, t.times(10, 3)
    d.do("alloc", 8 * MIB)
    w.says("before", 8 * MIB)
    d.do("start", 65536, 50, 2)
    time.sleep(t.times(5, 1))
    quiet = d.do("stop")
    d.do("start", 65536, 50, 2)
    w.daemon.program.signal(signal.SIGSTOP)
    time.sleep(stop_s)
    stopped = d.do("stop")
    w.daemon.program.signal(signal.SIGCONT)
    for name, loop in (("running", quiet), ("stopped", stopped)):
        t.measure(f"steps, daemon {name}",
                  {k: loop[k] for k in ("steps", "p50_us", "p99_us", "worst_ns", "slow")})
    t.expect(stopped["failures"] == 0, "no call of the program failed")
    # A call that waits for the daemon waits for seconds; a busy machine delays one by milliseconds.
    t.expect(stopped["worst_ns"] < stop_s * 1e8, f"no call stalled ({stopped['worst_ns'] / 1e6:.1f} ms at worst)")
    if not t.dry:
        limit = 3 * quiet["p99_us"] + 100
        t.expect(stopped["p99_us"] <= limit, f"99 of 100 calls as fast as before ({stopped['p99_us']} us of {limit})")
    d.do("alloc", 3 * MIB)
    began = time.monotonic()
    w.says("after SIGCONT", 11 * MIB, 20)
    t.measure("until the sums were right again", time.monotonic() - began, "s")
    w.end()


@check("faults.program_killed", "SIGKILL of the program: its run is closed with the last call that it made",
       "DESIGN 4, issue 3", needs=DAEMON, seconds=90)
def program_killed(t):
    w = Watched(t)
    w.says("before", 0)
    # Slightly more than the daemon can have received when the signal arrives.
    made = w.driver.do("many", 4096, 2000)["count"]
    w.driver.do("alloc", 5 * MIB)
    w.driver.signal(signal.SIGKILL)
    w.driver.process.wait(10)
    began = time.monotonic()

    def closed():
        runs = w.daemon.runs(w.pid)
        state = runs[0]["state"] if runs else None
        return runs if isinstance(state, dict) and state.get("state") == "closed" else None

    runs = until(20, "the run is closed", closed)
    t.measure("until the run was closed", time.monotonic() - began, "s")
    run = runs[0]
    known = made * 4096 + 5 * MIB
    peak = run["devices"][0]["peak"]["tracked_bytes"] if run["devices"] else None
    t.expect(peak == known, f"its peak holds every call: {known:,} ({peak})")
    t.expect(run["coverage"]["allocations"] == made + 1, f"{made + 1} allocations ({run['coverage']['allocations']})")
    t.expect(run["coverage"]["lost"] == 0, f"nothing was lost ({run['coverage']['lost']})")
    until(10, "NVML forgets it", lambda: t.listed_used(w.pid) is None)
    until(10, "ps forgets it", lambda: w.daemon.row(w.pid) is None)
    w.daemon.stop()
    t.publish(w.daemon.recordings[-1], "faults-program-killed",
              {"runs": [{"pid": w.pid, "peak_tracked_bytes": known, "closed": True}]})


@check("faults.oom", "a request that cannot be met is recorded with its size; the program continues", "DESIGN 5, cupti.md 1.5",
       needs=DAEMON)
def oom(t):
    w = Watched(t)
    w.driver.do("alloc", 6 * MIB)
    w.driver.do("tag", "too/much")
    free = w.driver.do("info")["free"]
    asked = free + (1 << 30)
    answer = w.driver.ask("fail", asked)
    t.expect(answer["result"] == 2, f"the driver refuses ({answer['result']})")
    w.says("after", 6 * MIB)
    w.end()
    w.daemon.stop()
    failed = [r for r in read(w.daemon.recordings[-1].read_bytes()) if r.name == "AllocFailed"]
    t.expect([(r.bytes, r.result) for r in failed] == [(asked, 2)], f"one record of {asked:,} ({len(failed)})")
    if failed:
        told = failed[0].address
        t.measure("free bytes in the record", None if told == 2**64 - 1 else told, "B")
        t.measure("free bytes by cuMemGetInfo", free, "B")


@check("faults.uncovered", "a process without the agent: NVML's charge, and nothing else is known", "DESIGN 1, 5",
       needs=DAEMON)
def uncovered(t):
    if not t.listed:
        raise Skip("NVML lists no process, so a daemon cannot know of one without the agent")
    w = Watched(t)
    w.driver.do("alloc", 4 * MIB)
    bare = t.driver()
    bare.begin()
    bare.do("alloc", 50 * MIB)
    w.says("the covered one", 4 * MIB)
    used = t.used(bare.pid)
    row, fits = w.daemon.settled(bare.pid, used_bytes=used)
    t.expect(fits, f"the other's used is {used:,} ({row and row.get('used_bytes')})")
    t.expect(row and "uncovered" in row["flags"], f"it is called uncovered ({row and row['flags']})")
    t.expect(row and row["tracked_bytes"] is None, f"its tracked is unknown, not 0 ({row and row['tracked_bytes']})")
    bare.finish()
    until(10, "the other is gone", lambda: w.daemon.row(bare.pid) is None)
    w.end()


@check("faults.late", "a daemon that comes after the program has the same sums", "DESIGN 4", needs=DAEMON)
def late(t):
    daemon = t.keep(Daemon(t.machine, t.home, t.environment(), QUICK))
    d = t.driver(agent=daemon)
    d.begin()
    d.do("many", 2 * MIB, 10)
    d.do("tag", "after")
    d.do("alloc", 3 * MIB)
    began = time.monotonic()
    daemon.start()
    row, fits = daemon.settled(d.pid, 15, tracked_bytes=23 * MIB)
    t.measure("until the sums were right", time.monotonic() - began, "s")
    t.expect(fits, f"tracked is 23 MiB ({row and row.get('tracked_bytes')})")
    d.finish()
