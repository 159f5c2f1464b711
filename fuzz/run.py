#!/usr/bin/env python3
"""Builds the fuzz targets and runs them one after the other; `make fuzz` calls this.

    fuzz/run.py [--runs N] [--seconds N] [--values | --quick | --sanitize] [--record] [TARGET ...]

Seeds are fuzz/seeds/TARGET and, if GPUMEM_SAMPLES is set, the samples of that format. New inputs are kept in
target/fuzz/corpus/TARGET, crashing inputs in target/fuzz/crashes/TARGET. Prints one line for each target and fails if a
target failed. --record adds the runs to the table in fuzz/README.md. --quick is five times as fast, for high run counts
once the corpus no longer grows: comparisons are not traced, inputs are short, and only the parsing crate is counted for
imports. --sanitize: with AddressSanitizer, for unsafe code.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = ROOT / "target" / "fuzz"
TABLE = HERE / "README.md"
TRIPLE = "x86_64-unknown-linux-gnu"

# Coverage instrumentation: the compiler counts edges and reports the operands of comparisons.
COVERAGE = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    # Removes the counters of unused functions, nine in ten, which each run would clear and read.
    "-Clink-arg=-Wl,-z,start-stop-gc",
]
COMPARISONS = "-Cllvm-args=-sanitizer-coverage-trace-compares"
# Maximum input size in bytes for --quick, except for formats that need more.
SHORT = 256
WHOLE = {"import_run", "control_answer"}
# Maximum input size in bytes; 2048 for other targets.
LONGEST = {"wire": 1024, "stream": 1024, "kernel_log": 512, "proc": 512, "who": 1024, "packed": 512, "ledger": 2048, "import_run": 4096, "control_answer": 4096,
           "typed": 64, "maps": 512, "store": 512, "prometheus": 2048}
# Third-party sample files that seed a target.
SAMPLES = {
    "import_tbd_log": "tbd-log/*", "import_mxnet2_csv": "mxnet2-csv/*", "import_mxnet1_trace": "mxnet1-trace/*.json",
    "import_mxnet1_table": "mxnet1-trace/*.md", "import_tbd_analysis": "tbd-analysis/*",
    "import_tbd_mem_csv": "pytorch-mem-profiler-csv/*", "import_nvidia_smi_csv": "nvidia-smi-csv/*",
    "import_torch_snapshot": "pytorch-snapshot/*", "import_guess": "*/*",
}
# Bytes used from a sample's beginning, middle and end, because mutating megabytes finds nothing.
PIECE = 900


def targets():
    """Returns each target's name with the features that it needs."""
    all = tomllib.loads((HERE / "Cargo.toml").read_text())["bin"]
    return {one["name"]: one.get("required-features", []) for one in all}


def folder_of(name, args):
    """Returns the build folder. Builds with other counters need their own: cargo does not see counted.sh's settings."""
    if args.quick:
        return OUT / ("quick-runs" if name.startswith("import_") else "quick")
    return OUT / ("asan" if args.sanitize else "build")


def build(names, folder, args):
    sanitize = args.sanitize
    counted = ROOT / "runs" if folder.name == "quick-runs" else ROOT
    env = dict(os.environ, CARGO_TARGET_DIR=str(folder), CARGO_ENCODED_RUSTFLAGS="-Zsanitizer=address" if sanitize else "")
    coverage = COVERAGE if args.quick else [*COVERAGE, COMPARISONS]
    # Instrumenting third-party crates takes three quarters of the time, and steers inputs to their code instead of ours.
    env.update(RUSTC_WRAPPER=str(HERE / "counted.sh"), FUZZ_COUNTED=str(counted), FUZZ_FLAGS=" ".join(coverage))
    env.update({"RUSTC_BOOTSTRAP": "1"} if sanitize else {})
    command = [os.environ.get("CARGO", "cargo"), "build", "-q", "--release", "--target", TRIPLE]
    command += [word for name in names for word in ("--bin", name)]
    known = targets()
    if features := sorted({feature for name in names for feature in known[name]}):
        command += ["--features", ",".join(features)]
    subprocess.run(command, cwd=HERE, env=env, check=True)


def golden():
    """Returns a recording's header and one frame for each kind of record, as released versions wrote them."""
    lines = (ROOT / "tests/golden/wire/v1.txt").read_text().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines)
    frames = [bytes.fromhex(text) for name, text in found.items() if name.split()[0].isdigit()]
    return bytes.fromhex(found["recording 1.0"]), frames


def keep(folder, content):
    (folder / hashlib.sha1(content).hexdigest()).write_bytes(content)


def seeds(name):
    """Returns the folders of a target's seeds. The corpus is first, because libFuzzer adds inputs to the first folder."""
    corpus, sampled = OUT / "corpus" / name, OUT / "samples" / name
    for folder in (corpus, sampled):
        folder.mkdir(parents=True, exist_ok=True)
    own = HERE / "seeds" / ("import_guess" if name == "report" else name)
    root = os.environ.get("GPUMEM_SAMPLES")
    for sample in sorted(Path(root).glob(SAMPLES[name])) if root and name in SAMPLES else []:
        whole = sample.read_bytes()
        middle = whole.find(b"\n", len(whole) // 2) + 1
        head = whole[:PIECE]
        line = whole[: whole.find(b"\n") + 1]
        for piece in (head, line + whole[middle : middle + PIECE], line + whole[-PIECE:]):
            keep(sampled, piece)
    header, frames = golden()
    if name in ("wire", "stream"):
        for frame in frames:
            keep(sampled, (b"\0" if name == "stream" else b"") + frame)
    if name == "import_recording":
        for at in range(0, len(frames), 8):
            keep(sampled, header + b"".join(frames[:2] + frames[at : at + 8]))
    if name == "import_guess":  # it knows all formats by their seeds
        return [corpus, sampled, *(folder for folder in sorted((HERE / "seeds").glob("import_*")))]
    if name == "report":
        for seed in sorted((HERE / "seeds").glob("import_*/*")):
            keep(sampled, b"\0" + seed.read_bytes())
        keep(sampled, b"\0" + header + b"".join(frames))
    return [corpus, sampled] + ([own] if own.is_dir() else [])


def run(name, program, args):
    crashes = OUT / "crashes" / name
    crashes.mkdir(parents=True, exist_ok=True)
    longest = SHORT if args.quick and name not in WHOLE else LONGEST.get(name, 2048)
    command = [
        str(program), f"-runs={args.runs}", f"-max_total_time={args.seconds}", "-print_final_stats=1", "-timeout=25", "-rss_limit_mb=1024",
        f"-max_len={longest}", f"-artifact_prefix={crashes}/", "-reload=0", "-verbosity=1",
    ]
    if args.quick:
        command += ["-reduce_inputs=0", "-use_counters=0"]
    if args.values:
        command.append("-use_value_profile=1")
    words = HERE / "words" / f"{name}.txt"
    command += [f"-dict={words}"] if words.is_file() else []
    before = set(crashes.iterdir())
    log = OUT / f"{name}.log"
    with open(log, "wb") as out:
        # SQLite defines two tables of the same name, which AddressSanitizer would report.
        env = dict(os.environ, ASAN_OPTIONS="detect_odr_violation=0")
        ended = subprocess.run(command + [str(folder) for folder in seeds(name)], stdout=out, stderr=out, cwd=OUT, env=env)
    text = log.read_text(errors="replace")
    stat = lambda what: int((re.findall(rf"stat::{what}:\s+(\d+)", text) or ["0"])[-1])
    known = (re.findall(r"cov: (\d+)", text) or ["0"])[-1]
    found = sorted(set(crashes.iterdir()) - before)
    corpus = len(list((OUT / "corpus" / name).iterdir()))
    done = {"runs": stat("number_of_executed_units"), "speed": stat("average_exec_per_sec"), "edges": int(known), "corpus": corpus}
    failed = bool(found) or ended.returncode != 0
    print(f"{name:24}{done['runs']:>12}{done['speed']:>9}{done['edges']:>8}{corpus:>8}{len(found):>8}", flush=True)
    for one in found:
        print(f"  {one.relative_to(ROOT)}; see {log.relative_to(ROOT)}")
    if failed and not found:
        print(f"  ended with {ended.returncode}; see {log.relative_to(ROOT)}")
    return done, failed


def rows(text):
    """Returns the table's rows: name -> runs, edges, input."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch(r"`\w+`", cells[0]):
            found[cells[0].strip("`")] = cells[1:]
    return found


def record(name, done):
    """Updates runs and edges in a target's row. Its description is written manually."""
    text = TABLE.read_text()
    cells = rows(text).get(name)
    if cells is None:
        sys.exit(f"{TABLE.name} has no row for {name}: write one")
    runs = int(cells[0].replace(",", "") or 0) + done["runs"]
    edges = max(int(cells[1].replace(",", "") or 0), done["edges"])
    row = re.compile(rf"^\| `{name}` \|[^|]*\|[^|]*\|", re.M)
    TABLE.write_text(row.sub(f"| `{name}` | {runs:,} | {edges:,} |", text))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=0, help="for each target; 0: until the runs are done")
    parser.add_argument("--values", action="store_true", help="keep inputs that come nearer to a comparison, too: slower, and deeper")
    parser.add_argument("--quick", action="store_true", help="for numbers: short inputs, and no tracing of comparisons")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("targets", nargs="*")
    args = parser.parse_args()
    known = targets()
    names = args.targets or list(known)
    if wrong := [name for name in names if name not in known]:
        sys.exit(f"there is no target {wrong[0]}: {', '.join(known)}")
    OUT.mkdir(parents=True, exist_ok=True)
    folders = {name: folder_of(name, args) for name in names}
    for folder in () if args.no_build else dict.fromkeys(folders.values()):
        build([name for name in names if folders[name] == folder], folder, args)
    print(f"{'target':24}{'runs':>12}{'runs/s':>9}{'edges':>8}{'corpus':>8}{'failed':>8}")
    failed = False
    for name in names:
        done, bad = run(name, folders[name] / TRIPLE / "release" / name, args)
        failed |= bad
        if args.record:
            record(name, done)
    sys.exit(failed)


if __name__ == "__main__":
    main()
