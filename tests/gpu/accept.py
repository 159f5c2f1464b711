#!/usr/bin/env python3
"""Imports the results of a run on hardware into the repository: call costs for the simulated GPU, and small recordings as
fixtures, with personal and machine-specific data removed. See README.md.

    accept.py RESULTS [--into REPOSITORY]
"""

import argparse
import json
import struct
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from suite import table, wire  # noqa: E402
from suite.questions import answers  # noqa: E402

LARGEST = 1 << 20
HELLO, MODULE, AGENT, FACTS, SOURCE = 1, 5, 85, 100, 102


def plain(text):
    """Removes the folders from paths."""
    return " ".join(word.rpartition("/")[2] if "/" in word else word for word in text.split(" "))


def facts(text):
    """Reduces a process's facts to its short name, also as its command."""
    comm = next((line[5:] for line in text.splitlines() if line.startswith("comm=")), "program")
    return f"comm={comm}\ncommand={comm}\n"


def claims(text):
    """Keeps only numeric claims: ranks and sizes, no names of jobs or hosts."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.partition("=")[2].isdigit())


REDACT = {HELLO: claims, MODULE: plain, AGENT: plain, FACTS: facts, SOURCE: plain}


def redacted(data):
    """Returns the recording with redacted records in the same order. A truncated last record is omitted."""
    out, at = [data[:16]], 16
    for record in wire.read(data):
        length = struct.unpack_from("<I", data, at)[0]
        slot, payload = data[at + 4 : at + 4 + wire.SLOT.size], record.payload
        if record.kind in REDACT:
            payload = REDACT[record.kind](payload.decode()).encode()
        if record.kind == FACTS and record.bytes not in (0, 2**64 - 1):  # root, and unknown
            fields = list(wire.SLOT.unpack(slot))
            fields[wire.FIELDS.index("bytes")] = 1000  # the uid
            slot = wire.SLOT.pack(*fields)
        out.append(struct.pack("<I", len(slot) + len(payload)) + slot + payload)
        at += 4 + length
    return b"".join(out)


def recordings(results, packs, into):
    """Copies small recordings of checks that passed; returns their names."""
    passed = {r["name"] for r in results if r["verdict"] in ("pass", "measured")}
    files = {}
    for pack in packs:
        with tarfile.open(pack) as tar:
            for member in tar:
                if member.isfile() and "/" not in member.name:
                    files[member.name] = tar.extractfile(member).read()
    taken = []
    for name, data in sorted(files.items()):
        stem, _, kind = name.rpartition(".")
        beside = files.get(f"{stem}.json")
        if kind != "gpumem" or beside is None or len(data) > LARGEST:
            continue
        known = json.loads(beside)
        if known["check"] not in passed:
            continue
        clean = redacted(data)
        before, after = (wire.Account(wire.read(d)) for d in (data, clean))
        if (before.counts, before.tracked()) != (after.counts, after.tracked()):
            raise SystemExit(f"{name}: not the same recording after redaction")
        machine = known["machine"]
        if isinstance(machine, dict):
            known["machine"] = {k: machine.get(k) for k in ("name", "driver", "cuda", "nvml")}
        (into / f"{stem}.gpumem").write_bytes(clean)
        (into / f"{stem}.json").write_text(json.dumps(known, indent=1) + "\n")
        taken.append(stem)
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="the folder that run.py wrote")
    parser.add_argument("--into", type=Path, default=HERE.parents[1], help="the repository")
    parser.add_argument("--dry-run-too", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    whole = json.loads((options.results / "results.json").read_text())
    if "dry run" in whole["head"]["title"] and not options.dry_run_too:
        sys.exit(f"{options.results} is of a dry run: the simulated GPU is not evidence")
    failed = [r["name"] for r in whole["results"] if r["verdict"] == "fail"]
    if failed:
        print(f"failed on the machine, check these first: {', '.join(failed)}")
    taken = recordings(whole["results"], sorted(options.results.glob("recordings-*.tar.gz")),
                       options.into / "tests/gpu/recordings")
    print(f"tests/gpu/recordings: {', '.join(taken) or 'nothing that is small, and whose check passed'}")
    costs = options.results / "costs.txt"
    if costs.exists():
        measured = sum(evidence.startswith("measured on") for _, evidence in table.parse(costs.read_text()).values())
        (options.into / "tests/fake-gpu/costs.txt").write_text(costs.read_text())
        print(f"tests/fake-gpu/costs.txt: {measured} costs are measured")
    else:
        print("no costs.txt: table.costs did not run")
    print("\nFor ARCHITECTURE.md:\n")
    print("\n".join(answers(whole["results"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
