"""The first seconds on a driver: programs/probe.c tests the assumptions of all other checks."""

import json

from ..check import check
from ..programs import Ended

# Fields that identify a fact, in addition to its probe.
LABELS = ("call", "bytes", "state", "subscribed")
SIGALRM = 14


def label(fact):
    return " ".join([fact["probe"], *(f"{key} {fact[key]}" for key in LABELS if key in fact)])


@check("probe.driver", "the twelve most important questions, each by a few calls in a separate process", "DESIGN 7", needs=("probe",),
       seconds=300, questions=(16, 17))
def driver(t):
    libraries = {"PROBE_CUPTI": t.machine.cupti, "PROBE_CUDART": t.machine.cudart}
    p = t.program([t.machine.built["probe"]], **{k: v for k, v in libraries.items() if v})
    facts, ends, lines = {}, {}, open(t.home / "probe.txt", "w")
    try:
        while True:
            line = p.line(120)
            lines.write(line + "\n")
            lines.flush()
            fact = json.loads(line)
            if "signal" in fact:
                ends[fact["probe"]] = fact
                continue
            facts.setdefault(fact["probe"], []).append(fact)
            name = label(fact)
            while name in t.result.data["measured"]:
                name += " again"
            t.measure(name, {k: v for k, v in fact.items() if k not in ("probe", *LABELS)})
    except Ended:
        lines.close()
    t.expect(p.wait() == 0, "the program ended well")
    for name, end in ends.items():
        # A crash is also a result: the probe tests whether a driver crashes there.
        if end["status"] or end["signal"]:
            t.note(f"{name} ended with status {end['status']}, signal {end['signal']}")
        t.expect(end["signal"] != SIGALRM, f"{name} was done in time ({end['seconds']} s)")
        t.expect(facts.get(name), f"{name} found something")
    t.expect(len(ends) == 12, f"there are twelve probes ({len(ends)})")
    t.measure("seconds", {name: end["seconds"] for name, end in ends.items()})
    first = next((f for f in facts.get("callbacks", []) if f.get("call") == "cudaFree(0)"), None)
    if first:
        t.answer(16, f"cudaFree(0) as the first call of libcudart: {' '.join(first['seen'])}.")
    for fact in facts.get("vmmfd", []):
        if "held_by_fd" in fact:
            t.answer(17, f"A handle of {fact['made']:,} B, released and exported: {fact['held_by_fd']:,} B; with the descriptor "
                         f"closed: {fact['after_close']:,} B.")
