"""The agent is loaded into programs of every kind, and sees their allocations."""

import json
import re
import subprocess

from ..check import Skip, check
from ..programs import Ended
from ..wire import read
from .common import MIB, QUICK, becomes, covered

AGENT = ("driver", "libgpumem.so")


@check("attach.driver", "an injected program of the driver API is covered from cuInit on; its tags arrive",
       "DESIGN 4, cupti.md 6.1", needs=AGENT, questions=(1,))
def driver(t):
    path = t.recording()
    d = t.driver(agent=path)
    facts = d.begin()
    t.expect(facts["agent"], "the agent is loaded and offers its functions")
    d.do("alloc", 64 * MIB)
    d.do("tag", "model/layers.0")
    d.do("alloc", 20 * MIB)
    d.do("tag", "attention")
    last = d.do("alloc", 3 * MIB)
    d.do("untag")
    d.do("free", last["id"])
    d.do("untag")
    d.do("alloc", 5 * MIB)
    known = d.tracked()
    t.expect(d.finish() == 0, "the program ended well")
    account = t.account(path)
    covered(t, account)
    t.expect(account.devices.get(0) == facts["uuid"], f"the device is {facts['uuid']} ({account.devices})")
    t.expect(account.tracked() == known, f"tracked is {known:,} ({account.tracked():,})")
    tags = {"": 69 * MIB, "model/layers.0": 20 * MIB}
    t.expect(account.bytes_by_tag() == tags, f"tags are {tags} ({account.bytes_by_tag()})")
    used = {account.tags[r.tag] for r in read(path.read_bytes()) if r.name == "AllocEnd"}
    t.expect("model/layers.0/attention" in used, f"the inner scope named its allocation ({used})")
    t.expect(account.bye, "it ended with a Bye record")
    t.measure("state", account.states)
    t.answer(1, f"In the hook of a driver of CUDA {facts['driver'] // 1000}.{facts['driver'] % 1000 // 10} the agent is "
                f"{account.states[0][0] if account.states else 'silent'}.")
    t.measure("records", dict(account.counts))
    t.publish(path, "attach-driver", {"runs": [{"pid": d.pid, "tracked_bytes": known, "tags": tags}]})


@check("attach.without_tags", "a program that names nothing is covered all the same", "DESIGN 4", needs=AGENT)
def without_tags(t):
    path = t.recording()
    d = t.driver(agent=path)
    d.begin()
    d.do("many", 4096, 100)
    known = d.tracked()
    d.finish()
    account = t.account(path)
    covered(t, account)
    t.expect(account.tracked() == known, f"tracked is {known:,} ({account.tracked():,})")
    t.expect(set(account.bytes_by_tag()) == {""}, f"no tag is invented ({account.bytes_by_tag()})")


@check("attach.hidden", "a program that sees no GPU ends as it does without the agent", "DESIGN 4, cupti.md 6.1", needs=AGENT)
def hidden(t):
    for visible in ("", "-1", "7"):
        found = []
        for agent in (None, t.recording(f"hidden{visible}")):
            d = t.driver(agent=agent, CUDA_VISIBLE_DEVICES=visible)
            found.append([d.ask("init")["result"], d.ask("device", 0)["result"], d.finish()])
        without, with_agent = found
        t.measure(f"CUDA_VISIBLE_DEVICES={visible!r}: cuInit, cuDeviceGet, exit status", without)
        t.expect(without[0] != 0, f"{visible!r} hides the GPU (cuInit {without[0]})")
        t.expect(without == with_agent, f"{visible!r}: the same with the agent ({with_agent} and {without})")


@check("attach.context", "the runtime's primary context is booked once, with and without callback 386", "cupti.md 2.3",
       needs=AGENT, keys=("cuda.muted=386",), questions=(16,))
def context(t):
    if not t.dry and not t.machine.cudart:
        raise Skip("no libcudart beside a toolkit or Python")
    path = t.recording()
    d = t.driver(agent=path)
    d.do("init")
    facts = d.do("device", 0)
    # cuda.muted: the simulated driver makes no callback for the call.
    d.do(*(("context",) if t.dry else ("cudart", t.machine.cudart)))
    d.finish()
    account = t.account(path)
    covered(t, account)
    made = account.counts["ContextCreate"]
    events = {kind: sum(r.detail == kind for r in account.events) for kind in {r.detail for r in account.events}}
    t.measure("driver events by kind", events)
    t.expect(made == 1, f"one context is booked ({made})")
    t.expect(account.devices == {0: facts["uuid"]}, f"on the device {facts['uuid']} ({account.devices})")
    t.answer(16, f"The agent books {made} context of the runtime.")


@check("attach.disabled", "GPUMEM_DISABLE=1 leaves the program alone", "issue 3, 1", needs=AGENT)
def disabled(t):
    path = t.recording()
    d = t.driver(agent=path, GPUMEM_DISABLE=1)
    d.begin()
    d.do("alloc", MIB)
    t.expect(d.finish() == 0, "the program ended well")
    t.expect(not path.exists(), "nothing was recorded")


@check("attach.trainer", "a training loop with scopes, pools, threads: tracked equals its own accounts",
       "issue 3, 5", needs=("trainer", "libgpumem.so"), seconds=120)
def trainer(t):
    path = t.recording()
    p = t.program([t.machine.program("trainer"), "--steps", "20", "--oom"], agent=path)
    lines = until_end(p)
    t.expect(p.wait() == 0, "the trainer ended well")
    account = t.account(path)
    covered(t, account)
    own = re.search(r"tracked=(\d+) peak=(\d+)", lines[-1] if lines else "")
    t.expect(own, f"the trainer printed its sums ({lines[-1:]})")
    if own:
        t.measure("tracked by the trainer", int(own[1]), "B")
        t.expect(account.tracked() == int(own[1]), f"tracked is {int(own[1]):,} ({account.tracked():,})")
    t.expect(any(r.result == 2 for r in account.failed), f"its failed request is there ({len(account.failed)})")
    t.measure("records", dict(account.counts))
    t.measure("tags", len(account.tags) - 1)
    t.note("; ".join(lines[-3:]))
    t.publish(path, "trainer", {"runs": [{"pid": p.pid, "tracked_bytes": int(own[1]) if own else None}]})


def until_end(program, timeout=100):
    lines = []
    try:
        while True:
            lines.append(program.line(timeout))
    except Ended:
        return lines


def runtime_program(t, name):
    """Runs runtime.cu, which prints its own accounts in its last line."""
    path = t.recording()
    p = t.program([t.machine.built[name]], agent=path)
    lines = until_end(p)
    t.expect(p.wait() == 0, "the program ended well")
    known = json.loads(lines[-1])
    account = t.account(path)
    covered(t, account)
    sums = account.bytes_by_kind()
    for kind in ("device", "pitched", "managed", "pinned", "registered"):
        t.expect(sums.get(kind, 0) == known.get(kind, 0),
                 f"{kind} bytes are {known.get(kind, 0):,} ({sums.get(kind, 0):,})")
    t.measure("array bytes by the agent", sums.get("array", 0), "B")
    t.measure("array bytes by shape", known.get("array", 0), "B")
    t.measure("callbacks of allocations", account.counts["AllocEnd"])
    t.answer(3, f"cudaMallocPitch, cudaMalloc3D, cudaMallocArray and cudaMalloc3DArray among {known['calls']} calls make "
                f"{account.counts['AllocEnd']} records.")
    t.measure("calls of the program", known["calls"])
    t.expect(account.counts["AllocEnd"] == known["calls"],
             f"each call is one record, inner calls are not booked ({account.counts['AllocEnd']})")
    t.measure("kernel launch", known["launch_ns"], "ns")
    t.publish(path, f"attach-{name}", {"runs": [{"pid": p.pid}]})


@check("attach.runtime", "a program of the runtime API, shared cudart, built by nvcc", "DESIGN 4, cupti.md 2.3",
       needs=("runtime", "libgpumem.so"), seconds=90, questions=(3,))
def runtime(t):
    runtime_program(t, "runtime")


@check("attach.runtime_static", "the same with a static cudart", "DESIGN 4, cupti.md 6.1",
       needs=("runtime_static", "libgpumem.so"), seconds=90)
def runtime_static(t):
    runtime_program(t, "runtime_static")


@check("attach.other_client_first", "another tool has the CUPTI subscription: that is reported, and its end is noticed",
       "cupti.md 5.4, traps 15", needs=AGENT + ("libcupti", "client", "gpumemd"), seconds=120)
def other_client_first(t):
    daemon = t.daemon(QUICK)
    client = t.machine.built["client"]
    d = t.driver(agent=daemon, GPUMEM_NEXT_INJECTION64_PATH=client, GPU_SUITE_CUPTI=t.machine.cupti)
    d.begin()
    d.do("alloc", 16 * MIB)
    flags = lambda: (daemon.row(d.pid) or {"flags": []})["flags"]

    def found():
        try:
            return [f["id"] for f in daemon.get(f"/v1/doctor?pid={d.pid}")["findings"]]
        except Ended:  # not known yet
            return []

    t.expect(becomes(lambda: "process.blocked" in found()), f"doctor reports blocked ({found()})")
    # A process of which neither NVML nor its agent reports any memory has no row.
    if t.listed:
        t.expect(becomes(lambda: "blocked" in flags()), f"ps says blocked ({daemon.row(d.pid)})")
        used = t.used(d.pid)
        row, fits = daemon.settled(d.pid, used_bytes=used)
        t.expect(fits, f"NVML's {used:,} bytes are there all the same ({row and row['used_bytes']})")
    t.measure("row while blocked", daemon.row(d.pid))
    doctor = daemon.get(f"/v1/doctor?pid={d.pid}")
    t.measure("doctor", [(f["id"], f["state"], f["subject"], f["text"], f.get("fix")) for f in doctor["findings"]])
    t.expect(any(f["state"] != "ok" for f in doctor["findings"]), "doctor has a finding")
    t.measure("the other lets go", d.ask("client_end", client)["result"])
    d.do("alloc", 4 * MIB)
    back = becomes(lambda: "process.blocked" not in found() and ("blocked" not in flags() if flags() else not t.listed), 75)
    t.expect(back, f"the agent takes over when the other is gone ({flags()}, {found()})")
    t.measure("row afterwards", daemon.row(d.pid))
    t.expect(d.finish() == 0, "the program ended well")


@check("attach.nested_init", "CUPTI itself runs the first cuInit, for another client: no hang, and the conflict is reported",
       "cupti.md 5.1", needs=AGENT + ("libcupti",), questions=(2,))
def nested_init(t):
    path = t.recording()
    d = t.driver(agent=path)
    other = d.ask("subscribe", t.machine.cupti)["result"]
    t.measure("cuptiSubscribe before cuInit", other)
    d.begin()
    d.do("alloc", 16 * MIB)
    t.expect(d.finish() == 0, "the program ended well")
    account = t.account(path)
    t.measure("states", account.states)
    states = [state for state, _, _ in account.states]
    t.answer(2, f"cuptiSubscribe before cuInit gives {other}, nothing hangs, and the agent reports {', '.join(states)}.")
    if other == 0:
        t.expect("blocked" in states, f"the agent says that it is blocked ({states})")
    else:
        t.expect(account.tracked() == 16 * MIB, f"the agent has everything ({account.tracked():,})")


@check("attach.other_client_later", "another CUPTI client that comes later is refused by CUPTI, unless the agent pauses",
       "cupti.md 5.4", needs=AGENT + ("libcupti",))
def other_client_later(t):
    path = t.recording()
    d = t.driver(agent=path)
    d.begin()
    d.do("alloc", 4 * MIB)
    t.measure("cuptiSubscribe with the agent", d.ask("subscribe", t.machine.cupti)["result"])
    t.expect(d.ask("pause")["result"] == 0, "the agent can be paused")
    paused = d.ask("subscribe", t.machine.cupti)
    t.expect(paused["result"] == 0, f"the other subscribes while the agent is paused ({paused['result']})")
    d.ask("unsubscribe")
    d.do("resume")
    d.do("alloc", 2 * MIB)
    t.expect(d.finish() == 0, "the program ended well")
    account = t.account(path)
    t.measure("states", account.states)
    states = [state for state, _, _ in account.states]
    # A pause that ends before the next message is reported only by the following state.
    t.expect({"paused", "late"} & set(states), f"the pause is reported ({states})")
    t.expect(account.tracked() == 6 * MIB, f"what came before and after is there ({account.tracked():,})")


@check("attach.run", "gpumemctl run sets up the agent and passes the exit code on", "issue 3, 4",
       needs=("gpumemctl", "driver", "libgpumem.so"))
def run(t):
    path = t.home / "run-%p.gpumem"
    command = [t.machine.program("gpumemctl"), "run", "--record", path, "--", t.machine.built["driver"]]
    environment = t.environment(GPUMEM_LIBRARY=t.library)
    done = subprocess.run([str(c) for c in command], env=environment, text=True, timeout=60, capture_output=True,
                          input="init\ndevice 0\ncontext\nalloc 8M\nexit 7\n")
    (t.home / "run.txt").write_text(done.stdout + done.stderr)
    t.expect(done.returncode == 7, f"the exit code is the program's ({done.returncode}): {done.stderr[-200:]}")
    found = list(t.home.glob("run-*.gpumem"))
    t.expect(len(found) == 1, f"one recording ({found})")
    if found:
        t.expect(t.account(found[0]).tracked() == 8 * MIB, "with the program's 8 MiB")
    t.note(done.stderr.strip()[-500:])
