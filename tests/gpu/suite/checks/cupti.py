"""CUPTI itself, in cases where only hardware shows its behaviour."""

import os
import re
import subprocess
import time

from ..check import Skip, check
from ..programs import Ended
from .common import MIB, becomes

AGENT = ("driver", "libgpumem.so", "libcupti")


@check("cupti.ids", "an id beyond the last one is refused with 1, so that an agent can know newer ids than its CUPTI",
       "cupti.md 1.2", needs=("driver", "libcupti"), questions=(14,))
def ids(t):
    d = t.driver()
    d.begin()
    one = d.ask("subscribe", t.machine.cupti)
    if one["result"]:
        raise Skip(f"cuptiSubscribe: {one['result']}")
    found = d.do("enable_ids")
    t.measure("CUPTI", one["version"])
    t.measure("ids", {k: found[k] for k in ("last", "beyond", "far")})
    t.expect((found["beyond"], found["far"]) == (1, 1), f"beyond {found['last']}: 1 ({found['beyond']}, {found['far']})")
    t.answer(14, f"CUPTI {one['version']} takes driver ids up to {found['last']}; the next one gives {found['beyond']}, "
                 f"a far one {found['far']}.")
    d.finish()


@check("cupti.context", "how libcudart's primary context is announced, and whether CUPTI knows its device by then", "cupti.md 2.3",
       needs=("driver", "libcupti"), questions=(16,))
def context(t):
    def seen(name, *make):
        d = t.driver()
        d.do("init")
        d.do("device", 0)
        one = d.ask("watch_contexts", t.machine.cupti)
        if one["result"]:
            raise Skip(f"cuptiSubscribe: {one['result']}")
        d.do(*make)
        found = d.do("contexts_seen")
        d.finish()
        t.measure(name, {k: found[k] for k in ("retains", "created", "inside", "device_result", "device")})
        t.expect(found["created"] == 1, f"{name}: CONTEXT_CREATED comes once ({found['created']})")
        t.expect((found["device_result"], found["device"]) == (0, 0),
                 f"{name}: cuptiGetDeviceId gives 0 and device 0 ({found['device_result']}, {found['device']})")
        how = "no callback 386" if not found["retains"] else "callback 386" + " around it" * bool(found["inside"])
        t.answer(16, f"{name}: CONTEXT_CREATED {found['created']} times, {how}; cuptiGetDeviceId gives {found['device_result']}.")
        return found

    plain = seen("cuDevicePrimaryCtxRetain by the program", "context")
    t.expect((plain["retains"], plain["inside"]) == (1, 1), f"a known call announces itself ({plain})")
    if t.dry:
        # As if it were made through a private table of the driver.
        subprocess.run([t.machine.fake / "bin" / "fake-gpu", "set", t.home / "machine", "cuda.muted=386"], check=True)
        private = seen("a private call", "context")
        t.expect((private["retains"], private["inside"]) == (0, 0), f"only CONTEXT_CREATED tells of it ({private})")
    elif t.machine.cudart:
        seen(f"cudaFree(0) of {os.path.basename(t.machine.cudart)}", "cudart", t.machine.cudart)
    else:
        t.note("no libcudart beside a toolkit or Python")


@check("cupti.unfit", "a libcupti of another CUDA version, loaded by the program or set by GPUMEM_CUPTI_PATH: all is seen, or the agent "
       "reports why not",
       "cupti.md 7", needs=("driver", "libgpumem.so"), seconds=120, questions=(13,), keys=("cuda.version=11080",))
def unfit(t):
    driver, told = t.nvml.facts()["cuda"], []
    others = [path for path in t.machine.cuptis if t.dry or path != t.machine.cupti]
    if not others:
        raise Skip("only one libcupti is here")
    refused = 0
    for path in others:
        for how in ("loaded", "named"):
            name = f"{os.path.basename(path)}, {how}"
            recording = t.recording(f"agent-{len(told)}")
            d = t.driver(agent=recording, **({"GPUMEM_CUPTI_PATH": path} if how == "named" else {}))
            loaded = d.ask("load", path)["result"] if how == "loaded" else None
            d.begin()
            d.do("alloc", 4 * MIB)
            code = d.finish()
            t.expect(code == 0, f"{name}: the program ends well ({code})")
            account = t.account(recording)
            states = [(s, r) for s, r, _ in account.states]
            t.measure(name, {"dlopen": loaded, "states": account.states, "tracked": account.tracked()})
            works = account.tracked() == 4 * MIB
            refused += not works
            t.expect(works or "covered" not in [s for s, _ in states][-1:],
                     f"{name}: the agent sees all, or its state is not covered ({states})")
            told.append(f"{name}: {'works' if works else states}")
    if t.dry:
        t.expect(refused == 2, f"the simulated libcupti of CUDA 12 and 13 refuse that driver ({told})")
    t.answer(13, f"On a driver of CUDA {driver}: {'; '.join(told)}.")


@check("cupti.several", "subscriptions that allow several, and one of the first kind after and before them", "cupti.md 5.1",
       needs=("driver", "libcupti"), questions=(8,), keys=("cupti.multi=1",))
def several(t):
    after, before = t.driver(), t.driver()
    after.begin()
    newer = after.ask("subscribe_newer", t.machine.cupti, 1)
    if newer["result"] == -1:
        raise Skip(f"CUPTI {newer.get('version')} has no cuptiSubscribe_v2")
    older = after.ask("subscribe", t.machine.cupti)
    t.measure("v2 that allows several, then v1", [newer["result"], older["result"]])
    heard = after.do("listen")
    t.measure("callbacks of one allocation: v1, v2", heard["heard"])
    after.finish()
    before.begin()
    first = before.ask("subscribe", t.machine.cupti)
    second = before.ask("subscribe_newer", t.machine.cupti, 1)
    t.measure("v1, then v2 that allows several", [first["result"], second["result"]])
    t.measure("who was in the way", second.get("old"))
    before.finish()
    t.answer(8, f"With CUPTI {newer['version']}: v2 with allow=1 gives {newer['result']}, v1 after it {older['result']} (they "
                f"heard {heard['heard'][1]} and {heard['heard'][0]} callbacks of an allocation); v2 after v1 gives "
                f"{second['result']}.")


@check("cupti.versions", "the agent with each libcupti of this machine: it works, or the program does not notice",
       "cupti.md 7", needs=AGENT, seconds=120, questions=(13, 1))
def versions(t):
    told, good = [], 0
    driver = t.nvml.facts()["cuda"]
    for number, path in enumerate(t.machine.cuptis):
        recording = t.recording(f"agent-{number}")
        d = t.driver(agent=recording, GPUMEM_CUPTI_PATH=path)
        d.begin()
        d.do("alloc", 4 * MIB)
        t.expect(d.finish() == 0, f"{path}: the program ends well")
        try:
            account = t.account(recording)
        except Ended as error:
            told.append(f"{os.path.basename(path)}: {error}")
            continue
        states = [(s, r) for s, r, _ in account.states]
        works = account.tracked() == 4 * MIB
        good += works
        t.measure(path, {"states": states, "tracked": account.tracked()})
        t.expect(works or "covered" not in [s for s, _ in states][-1:],
                 f"{path}: it sees everything, or reports that it does not ({states})")
        told.append(f"{os.path.basename(os.path.realpath(path))}: {'works' if works else states}")
    t.expect(good, "one of them works")
    t.answer(13, f"On a driver of CUDA {driver}: " + "; ".join(told) + ".")
    t.answer(1, f"On a driver of CUDA {driver} {good} of {len(t.machine.cuptis)} CUPTI libraries can be subscribed to in the "
                "hook.")


def asked(t):
    """Returns how many times the simulated driver's device count was queried. The agent uses that call to test its callbacks."""
    shown = subprocess.run([t.machine.fake / "bin" / "fake-gpu", "show", t.home / "machine"], capture_output=True, text=True)
    found = re.search(r"^device_counts=(\d+)$", shown.stdout, re.M)
    return int(found[1]) if found else 0


@check("cupti.finalized", "CUPTI is finalised for the whole process: the program continues, and recorded memory stays",
       "cupti.md 5.2", needs=AGENT + ("gpumemd",), seconds=90, questions=(12,))
def finalized(t):
    path = t.recording()
    d = t.driver(agent=path, GPUMEM_CUPTI_PATH=t.machine.cupti)
    d.begin()
    d.do("alloc", 4 * MIB)
    states = lambda: [s for s, _, _ in t.account(path).states] if path.exists() else []
    becomes(lambda: states(), 5)
    # CUPTI does not report the end of a subscription: the agent polls once a second.
    if t.dry:
        before = asked(t)
        becomes(lambda: asked(t) >= before + 2, 20)
    else:
        time.sleep(3)
    said = len(states())
    ended = d.ask("finalize", t.machine.cupti)
    t.measure("cuptiFinalize", ended["result"])
    d.do("alloc", 8 * MIB)
    began = time.monotonic()
    noticed = becomes(lambda: len(states()) > said, 15)
    t.measure("noticed after", round(time.monotonic() - began, 2) if noticed else None, "s")
    becomes(lambda: states()[-1] in ("covered", "late"), 10)  # it subscribes anew
    d.do("alloc", 16 * MIB)
    t.expect(d.finish() == 0, "the program ends well")
    account = t.account(path)
    t.measure("states", account.states)
    t.measure("tracked, of 28 MiB", account.tracked(), "B")
    t.expect(account.tracked() >= 4 * MIB, f"what came before is there ({account.tracked():,})")
    t.expect(noticed or account.tracked() == 28 * MIB, f"the agent sees everything, or reports that it does not ({states()})")
    t.answer(12, f"cuptiFinalize by another gives {ended['result']}; of 4 MiB before it, 8 right after and 16 later the agent has "
                 f"{account.tracked() // MIB} MiB, and reported {', '.join(states())}.")
