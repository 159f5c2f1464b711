"""Processes that become others: fork, exec, namespaces, launchers."""

import json
import sys
import time

from ..check import Skip, check
from ..programs import Ended, until
from ..wire import read
from .common import GRANULE, MIB, QUICK, Watched, covered

AGENT = ("driver", "libgpumem.so")
DAEMON = AGENT + ("gpumemd",)


@check("processes.fork", "a child after CUDA: it runs and ends as without the agent, and sends nothing",
       "DESIGN 4, cupti.md 8", needs=DAEMON, questions=(15,))
def fork(t):
    w, plain = Watched(t), t.driver()
    plain.begin()
    codes = {}
    w.driver.do("alloc", 4 * MIB)
    for how in ("exit", "_exit", "init", "alloc"):
        with_agent, without = w.driver.do("fork", how), plain.do("fork", how)
        t.measure(how, {"code": with_agent["code"], "status": with_agent["status"], "without": without["code"]})
        codes[how] = (with_agent["code"], without["code"])
        same = [with_agent[k] == without[k] for k in ("code", "status")]
        t.expect(all(same), f"{how}: as without the agent ({with_agent['code']}, {with_agent['status']})")
    t.answer(15, f"In a child cuInit gives {codes['init'][0]} and cuMemAlloc {codes['alloc'][0]} with the agent, "
                 f"{codes['init'][1]} and {codes['alloc'][1]} without; the parent went through cuInit, and what that forks, as "
                 "covered.")
    w.driver.do("alloc", 2 * MIB)
    w.says("the parent goes on", 6 * MIB)
    plain.finish()
    w.end()
    w.daemon.stop()
    pids = {r.thread for r in read(w.daemon.recordings[-1].read_bytes()) if r.name == "Hello"}
    t.expect(pids == {w.pid}, f"one process sent Hello ({pids})")


@check("processes.exec", "exec after CUDA: the new program begins from nothing under the same pid", "DESIGN 3", needs=DAEMON,
       seconds=90)
def execute(t):
    w = Watched(t)
    w.driver.do("alloc", 64 * MIB)
    w.says("before", 64 * MIB)
    answer = w.driver.do("exec")
    t.expect(answer["pid"] == w.pid, "the pid stays")
    w.driver.begin()
    w.driver.do("alloc", 5 * MIB)
    used = w.says("after", 5 * MIB, 20)
    t.measure("used after", used, "B")
    w.end()


@check("processes.namespace", "a process in another PID namespace is joined to its pid here",
       "DESIGN 3, nvml.md 0.4", needs=DAEMON + ("namespaces",), seconds=90)
def namespace(t):
    inside(t, t.machine.unshare())


@check("processes.user_namespace", "and one in another user namespace as well", "DESIGN 3, issue 3",
       needs=DAEMON + ("user_namespaces",), seconds=90)
def user_namespace(t):
    inside(t, t.machine.unshare(user=True))


def inside(t, unshare):
    if not t.listed:
        raise Skip("NVML lists no process")
    daemon = t.daemon(QUICK)
    d = t.driver(agent=daemon, before=unshare)
    d.begin()
    inner = d.do("init")["pid"]
    d.do("alloc", 9 * MIB)
    listed = lambda: {p for p in t.nvml.processes() if p != d.pid and descends(p, d.pid)} or None
    outer = until(15, "NVML lists the process", listed)
    t.measure("pid inside and here", [inner, sorted(outer)])
    pid = outer.pop()
    t.expect(inner != pid, f"it is another number inside ({inner} and {pid})")
    row, fits = daemon.settled(pid, 15, tracked_bytes=9 * MIB)
    t.expect(fits, f"tracked is 9 MiB under pid {pid} ({row})")
    row, fits = daemon.settled(pid, 15, used_bytes=t.used(pid))
    t.expect(fits and "covered" in row["flags"], f"and NVML's bytes with it ({row})")
    d.ask("exit", 0)


def descends(pid, ancestor):
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


LAUNCHER = """
import os, subprocess, sys
children = []
for rank in range(2):
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", GPUMEM_JOB="suite-job")
    children.append(subprocess.Popen([sys.argv[1]], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
print(*[c.pid for c in children], flush=True)
for line in sys.stdin:
    rank, command = line.split(maxsplit=1)
    child = children[int(rank)]
    child.stdin.write(command)
    child.stdin.flush()
    print(child.stdout.readline().strip(), flush=True)
for child in children:
    child.stdin.close()
    child.wait()
"""


@check("processes.children", "children of a launcher: each its own run, rank and job with it", "DESIGN 3, issue 3",
       needs=DAEMON, seconds=90)
def children(t):
    daemon = t.daemon(QUICK)
    p = t.program([sys.executable, "-c", LAUNCHER, t.machine.built["driver"]], agent=daemon)
    pids = [int(word) for word in p.line().split()]

    def tell(rank, command):
        p.say(f"{rank} {command}")
        answer = json.loads(p.line())
        if answer["result"]:
            raise Ended(f"{command}: {answer}")

    for rank in range(2):
        for command in ("init", "device 0", "context", f"alloc {(rank + 1) * 4}M"):
            tell(rank, command)
    for rank, pid in enumerate(pids):
        size = (rank + 1) * 4 * MIB
        row, fits = daemon.settled(pid, 15, tracked_bytes=size)
        t.expect(fits, f"rank {rank}: tracked is {size:,} ({row and row.get('tracked_bytes')})")
        runs = daemon.runs(pid)
        claims = runs[0]["process"]["claims"] if runs else {}
        t.expect(claims.get("rank") == str(rank) and claims.get("job") == "suite-job", f"rank and job ({claims})")
    tree = daemon.get(f"/v1/runs?tree={p.pid}")
    found = sorted(run["process"]["pid"] for run in tree)
    t.expect(found == sorted(pids), f"the launcher's pid gives its children ({found})")
    p.process.stdin.close()
    t.expect(p.wait() == 0, "all ended well")


@check("processes.full_ring", "a ring that is too small loses history, never state", "DESIGN 4", needs=DAEMON, seconds=90)
def full_ring(t):
    w = Watched(t, GPUMEM_RING_SLOTS=16)
    w.driver.do("alloc", 10 * MIB)
    w.driver.do("start", 4096, 0, 4)
    time.sleep(t.times(3, 1))
    loop = w.driver.do("stop")
    t.measure("steps", loop["steps"])
    t.expect(loop["failures"] == 0, "no call of the program failed")
    w.says("afterwards", 10 * MIB, 20)
    row = w.daemon.row(w.pid)
    t.measure("flags", row and row["flags"])
    w.end()
    run = w.daemon.runs(w.pid)
    t.measure("lost", run[0]["coverage"]["lost"] if run else None)


@check("processes.recording", "GPUMEM_RECORD: a file that any reader of recordings understands, with %p", "issue 3, 1",
       needs=AGENT)
def recording(t):
    path = t.home / "own-%p.gpumem"
    d = t.driver(agent=path)
    d.begin()
    d.do("many", GRANULE, 3)
    d.finish()
    account = t.account(t.home / f"own-{d.pid}.gpumem")
    covered(t, account)
    t.expect(account.tracked() == 3 * GRANULE, f"three granules ({account.tracked():,})")
