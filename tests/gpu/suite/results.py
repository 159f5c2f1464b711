"""Verdicts, and the files that hold them: results.json, results.md, and everything else packed, since only a few files
may come back from a borrowed machine."""

import io
import json
import os
import shutil
import tarfile
import time
from pathlib import Path

from .questions import answers

VERDICTS = ("fail", "pass", "measured", "skip")
LARGEST = 15 << 20  # of a pack; what may come back is 16 MiB a file


class Result:
    """Result of one check. Written to a file at every step, so that a killed check leaves its partial result."""

    def __init__(self, check, path):
        self.path = Path(path)
        self.data = {
            "name": check.name, "claim": check.claim, "where": check.where, "verdict": "fail",
            "reason": "it did not come to its end", "questions": list(check.questions), "measured": {}, "expected": [],
            "notes": [], "answers": [],
        }
        self.save()

    def save(self):
        half = self.path.with_suffix(".new")
        half.write_text(json.dumps(self.data, indent=1, default=str))
        os.replace(half, self.path)

    def measure(self, name, value, unit=""):
        self.data["measured"][name] = {"value": value, "unit": unit}
        self.save()

    def note(self, text):
        self.data["notes"].append(text)
        self.save()

    def answer(self, question, text):
        """A plain sentence about a question of reference/cupti.md 12."""
        self.data["answers"].append({"question": question, "text": text})
        self.save()

    def expect(self, true, text):
        self.data["expected"].append({"text": text, "met": bool(true)})
        self.save()
        return bool(true)

    def end(self, verdict=None, reason=None):
        missed = [e["text"] for e in self.data["expected"] if not e["met"]]
        if verdict is None:
            verdict = "fail" if missed else ("pass" if self.data["expected"] else "measured")
        self.data["verdict"] = verdict
        self.data["reason"] = reason or ("; ".join(missed) if missed else None)
        self.save()


def number(value):
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, (dict, list)):
        text = json.dumps(value)
        return text if len(text) <= 160 else text[:157] + "..."
    return str(value)


def as_markdown(head, results):
    count = {v: sum(r["verdict"] == v for r in results) for v in VERDICTS}
    out = [f"# {head['title']}", "", head["machine"], "",
           ", ".join(f"{count[v]} {v}" for v in VERDICTS if count[v]) + f"; {head['seconds']:.0f} s", "",
           "| check | verdict | claim |", "|---|---|---|"]
    for r in sorted(results, key=lambda r: VERDICTS.index(r["verdict"])):
        out.append(f"| {r['name']} | {r['verdict']} | {r['claim']} ({r['where']}) |")
    lines = answers(results)
    if lines:
        out += ["", "## Questions that hardware must answer", "", *lines]
    for r in results:
        out += ["", f"## {r['name']}: {r['verdict']}", "", f"{r['claim']} ({r['where']})"]
        if r["reason"]:
            out += ["", f"**{r['reason']}**"]
        if r["measured"]:
            out += ["", "| | |", "|---|---|"]
            cell = lambda m: (number(m["value"]) + " " + m["unit"]).strip().replace("|", "\\|")
            out += [f"| {name} | {cell(m)} |" for name, m in r["measured"].items()]
        out += [f"- {'met' if e['met'] else 'MISSED'}: {e['text']}" for e in r["expected"]]
        out += [f"- {note}" for note in r["notes"]]
    return "\n".join(out) + "\n"


class Report:
    """The output folder: results.json, results.md, recordings-N.tar.gz, logs.tar.gz."""

    def __init__(self, out, work, machine_line, title):
        self.out, self.work = Path(out), Path(work)
        self.out.mkdir(parents=True, exist_ok=True)
        self.results, self.started = [], time.monotonic()
        self.head = {"title": title, "machine": machine_line}

    def add(self, result):
        self.results.append(result)
        self.write()

    def write(self):
        head = dict(self.head, seconds=time.monotonic() - self.started)
        whole = json.dumps({"head": head, "results": self.results}, indent=1)
        for name, text in (("results.json", whole), ("results.md", as_markdown(head, self.results))):
            half = self.out / f".{name}"
            half.write_text(text)
            os.replace(half, self.out / name)

    def pack(self):
        """Writes the packs, at the end and at intervals: a run killed at its time limit leaves the packs so far."""
        for old in self.out.glob("recordings-*.tar.gz"):
            old.unlink()
        for made in sorted((self.work / "out").glob("*")):
            shutil.copyfile(made, self.out / made.name)
        kept = sorted((self.work / "recordings").glob("*"), key=lambda p: p.name)
        for number, group in enumerate(split(kept, 60 << 20), 1):
            if number > 4:
                break
            # A pack that is still too large loses its largest file.
            while group and not self.tar(f"recordings-{number}.tar.gz", group):
                group.remove(max(group, key=lambda path: path.stat().st_size))
        logs = [p for p in sorted(self.work.rglob("*")) if p.is_file() and p.suffix in (".log", ".txt", ".json", ".prom")]
        self.tar("logs.tar.gz", logs, relative=self.work, cut=1 << 20)

    def tar(self, name, files, relative=None, cut=None):
        half = self.out / f".{name}"
        with tarfile.open(half, "w:gz", compresslevel=6) as pack:
            for path in files:
                try:
                    data = path.read_bytes()
                except OSError:
                    continue
                if cut and len(data) > 2 * cut:
                    data = data[:cut] + b"\n[...]\n" + data[-cut:]
                info = tarfile.TarInfo(str(path.relative_to(relative)) if relative else path.name)
                info.size = len(data)
                info.mtime = 0
                pack.addfile(info, io.BytesIO(data))
        if half.stat().st_size > LARGEST:
            half.unlink()
            return False
        os.replace(half, self.out / name)
        return True


def split(paths, limit):
    """Groups of files that together stay below the limit; one that is larger alone is left out."""
    group, size = [], 0
    for path in paths:
        bytes = path.stat().st_size
        if bytes > limit:
            continue
        if group and size + bytes > limit:
            yield group
            group, size = [], 0
        group.append(path)
        size += bytes
    if group:
        yield group
