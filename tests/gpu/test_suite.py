"""The suite's own tests: its arithmetic, its reader of recordings, and that no check can hurt another.

    python3 -m unittest discover -s tests/gpu"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import accept  # noqa: E402
from suite import checks, plans, questions, stats, table, wire  # noqa: E402, F401
from suite.check import CHECKS, Test  # noqa: E402
from suite.checks.common import GRANULE, MIB, rounding  # noqa: E402
from suite.daemon import parse_metrics  # noqa: E402
from suite.machine import Machine, library_version  # noqa: E402
from suite.nvml import Error  # noqa: E402
from suite.results import Result, as_markdown, number, split  # noqa: E402


class Arithmetic(unittest.TestCase):
    def test_quantiles_are_values_that_were_there(self):
        values = list(range(100, 0, -1))
        self.assertEqual([stats.quantile(values, share) for share in (0.01, 0.5, 0.95, 0.99, 1)], [1, 50, 95, 99, 100])
        self.assertEqual(stats.quantile([7], 0.99), 7)
        self.assertIsNone(stats.quantile([], 0.5))

    def test_summary(self):
        found = stats.summary([5, 1, 3])
        self.assertEqual((found["n"], found["min"], found["p50"], found["max"]), (3, 1, 3, 5))
        self.assertEqual(stats.summary([]), {"n": 0})

    def test_an_interval_holds_the_median_and_narrows_with_more_values(self):
        few = [10 + (i * 7919 % 100) / 10 for i in range(10)]
        many = [10 + (i * 7919 % 1000) / 100 for i in range(1000)]
        for values in (few, many):
            low, high = stats.interval(values)
            self.assertLessEqual(low, stats.median(values))
            self.assertGreaterEqual(high, stats.median(values))
        width = lambda values: (lambda pair: pair[1] - pair[0])(stats.interval(values))
        self.assertLess(width(many), width(few))
        self.assertEqual(stats.interval(few), stats.interval(few), "it is repeatable")

    def test_drift_falls_out_of_pairs(self):
        without = [100 + 10 * i for i in range(20)]  # the machine gets slower and slower
        with_it = [value + 2 for value in without]
        found = stats.paired(without, with_it)
        self.assertEqual((found["difference"], found["difference_95"]), (2, [2, 2]))
        self.assertAlmostEqual(found["percent"], 100 * 2 / stats.median(without), places=1)
        self.assertRaises(ValueError, stats.paired, [1, 2], [1])
        self.assertRaises(ValueError, stats.paired, [], [])

    def test_slope(self):
        self.assertEqual(stats.slope([0, 1, 2], [5, 7, 9]), (5, 2))
        self.assertEqual(stats.slope([3], [4]), (4, None))
        self.assertEqual(stats.slope([3, 3], [4, 6]), (5, None))

    def test_rounding(self):
        self.assertEqual(rounding([]), 0)
        self.assertEqual(rounding([2 * MIB, 64 * MIB]), 0)
        self.assertEqual(rounding([2 * MIB + 1]), GRANULE - 1)
        self.assertEqual(rounding([1, 1]), GRANULE - 2, "small ones share a granule")
        self.assertEqual(rounding([MIB]), MIB)


def frame(kind, payload=b"", **fields):
    values = [fields.get(name, 0) for name in wire.FIELDS]
    values[wire.FIELDS.index("kind")] = kind
    slot = wire.SLOT.pack(*values)
    return struct.pack("<I", len(slot) + len(payload)) + slot + payload


def account(*frames, cut=0):
    data = wire.MAGIC + struct.pack("<HHI", 1, 0, 0) + b"".join(frames)
    return wire.Account(wire.read(data[: len(data) - cut]))


class Recordings(unittest.TestCase):
    def test_layout(self):
        self.assertEqual(wire.SLOT.size, 64)
        self.assertRaises(ValueError, lambda: list(wire.read(b"something else entirely")))

    def test_live_bytes_by_kind_and_tag(self):
        found = account(
            frame(4, b"a/b", tag=3),
            frame(16, seq=1, address=0x1000, bytes=100, tag=3, detail=1),
            frame(16, seq=2, address=0x2000, bytes=50, detail=17),
            frame(16, seq=3, address=0x3000, bytes=7, detail=1),
            frame(17, seq=4, address=0x3000),
            frame(18, seq=5, aux=4),
            frame(200, b"from a newer version"))
        self.assertEqual(found.bytes_by_kind(), {"device": 100, "pinned": 50})
        self.assertEqual((found.tracked(), found.bytes_by_tag()), (100, {"a/b": 100}))
        self.assertEqual((found.odd, found.holes), (0, 0))

    def test_a_refused_free_gives_back_what_it_took(self):
        taken = frame(16, seq=1, address=0x1000, bytes=100, detail=1)
        refused = account(taken, frame(17, seq=2, address=0x1000), frame(18, seq=3, aux=2, result=1))
        self.assertEqual(refused.tracked(), 100)
        nobodys = account(taken, frame(17, seq=2, address=0x9000), frame(18, seq=3, aux=2, result=1))
        self.assertEqual((nobodys.tracked(), nobodys.odd), (100, 0))
        contradiction = account(taken, frame(17, seq=2, address=0x9000), frame(18, seq=3, aux=2))
        self.assertEqual(contradiction.odd, 1)

    def test_a_handle_lives_as_long_as_its_last_reference_or_mapping(self):
        made = [frame(32, seq=1, address=5, bytes=64, result=1, detail=5), frame(33, seq=2, address=0x10, bytes=64, aux=5)]
        release = [frame(36, seq=3, address=5), frame(18, seq=4, aux=3)]
        unmap = [frame(34, seq=5, address=0x10, bytes=64), frame(18, seq=6, aux=5)]
        self.assertEqual(account(*made, *release).tracked(), 64)
        self.assertEqual(account(*made, *unmap).tracked(), 64)
        self.assertEqual(account(*made, *release, *unmap).tracked(), 0)

    def test_pools_count_with_what_they_reserve(self):
        found = account(frame(24, seq=1, address=9, detail=1), frame(16, seq=2, address=1, bytes=10, aux=9, detail=4),
                        frame(25, seq=3, address=9, bytes=2 * MIB, aux=10))
        self.assertEqual(found.tracked(), 2 * MIB)

    def test_holes_are_seen_and_a_cut_file_is_read_to_its_last_whole_frame(self):
        frames = [frame(16, seq=1, address=1, bytes=1, detail=1), frame(16, seq=4, address=2, bytes=2, detail=1)]
        self.assertEqual(account(*frames).holes, 2)
        self.assertEqual(account(*frames, cut=3).tracked(), 1)

    def test_devices_are_named_as_nvml_names_them(self):
        found = account(frame(3, address=0x51006D751A7E4D00, aux=0x8000475055000000, device=0))
        self.assertEqual(found.devices, {0: "GPU-51006d75-1a7e-4d00-8000-475055000000"})


class Texts(unittest.TestCase):
    def test_metrics(self):
        text = '# HELP a b\na_bytes{pid="7",tag="x \\"y\\" z"} 12\nup 1\nnot a line\n'
        self.assertEqual(parse_metrics(text), [("a_bytes", {"pid": "7", "tag": 'x \\"y\\" z'}, 12.0), ("up", {}, 1.0)])

    def test_numbers(self):
        self.assertEqual([number(v) for v in (1234567, 0.12345678, 12345.6, True, "x")],
                         ["1,234,567", "0.1235", "12,346", "True", "x"])

    def test_markdown_names_every_check_worst_first(self):
        result = lambda name, verdict: {"name": name, "claim": "c", "where": "w", "verdict": verdict, "reason": None,
                                        "measured": {"m": {"value": 1, "unit": "B"}}, "notes": [],
                                        "expected": [{"text": "e", "met": verdict == "pass"}]}
        head = {"title": "t", "machine": "m", "seconds": 1}
        text = as_markdown(head, [result("good", "pass"), result("bad", "fail")])
        self.assertLess(text.index("| bad |"), text.index("| good |"))
        self.assertIn("MISSED: e", text)
        self.assertIn("1 fail, 1 pass", text)

    def test_packs_stay_below_their_limit(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for index, size in enumerate([5, 5, 3, 30, 4]):
                paths.append(Path(folder) / str(index))
                paths[-1].write_bytes(b"x" * size)
            groups = [[p.name for p in group] for group in split(paths, 10)]
        self.assertEqual(groups, [["0", "1"], ["2", "4"]])


COSTS = HERE.parent / "fake-gpu" / "costs.txt"


def row(check, weight, **facts):
    same = {"name": "n", "call": "c", "result": 0, "process": None}
    return dict(same, check=check, device=weight, weight=weight, **facts)


class Accepting(unittest.TestCase):
    def test_people_and_places_are_not_in_what_is_committed(self):
        data = wire.MAGIC + struct.pack("<HHI", 1, 0, 0) + b"".join([
            frame(1, b"rank=3\njob=secret\nhost=box7\n", thread=5),
            frame(100, b"comm=train\ncommand=/home/eve/train.py --key k\nuser=eve\ncgroup=/user.slice/eve\n", bytes=4711,
                  thread=5),
            frame(5, b"/home/eve/lib/libtorch.so", tag=1), frame(4, b"a/b", tag=3),
            frame(16, seq=1, address=0x1000, bytes=100, tag=3, detail=1),
            frame(85, b"subscribed with /home/eve/libcupti.so.12", detail=1)]) + b"cut"
        clean = accept.redacted(data)
        for word in (b"eve", b"secret", b"box7", b"/home", b"key"):
            self.assertNotIn(word, clean)
        records = list(wire.read(clean))
        self.assertEqual([r.payload for r in records],
                         [b"rank=3\n", b"comm=train\ncommand=train\n", b"libtorch.so", b"a/b", b"",
                          b"subscribed with libcupti.so.12"])
        self.assertEqual(records[1].bytes, 1000, "the uid is unset")
        self.assertEqual(wire.Account(records).bytes_by_tag(), {"a/b": 100})

    def test_results_of_a_dry_run_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "results.json").write_text(json.dumps({"head": {"title": "a dry run"}, "results": []}))
            done = subprocess.run([sys.executable, HERE / "accept.py", folder, "--into", folder], capture_output=True,
                                  text=True)
            self.assertIn("not evidence", done.stderr)
            self.assertEqual(done.returncode, 1)


class Plans(unittest.TestCase):
    def test_each_check_is_in_exactly_one_plan(self):
        chosen = [name for plan in plans.PLANS for name in plans.members(plan, CHECKS)]
        self.assertEqual(sorted(chosen), sorted(CHECKS))

    def test_each_entry_names_a_check(self):
        for plan, entries in plans.PLANS.items():
            for place, entry in enumerate(entries):
                found = [name for name in CHECKS if plans.plan_of(name) == (plan, place)]
                self.assertTrue(found, f"plan {plan}: {entry}")

    def test_a_plan_begins_with_what_is_worth_most(self):
        first, second = plans.members(1, CHECKS), plans.members(2, CHECKS)
        self.assertEqual((first[0], first[-1]), ("probe.driver", "table.costs"))
        self.assertEqual(second[:2], ["torch.caching", "torch.async"])
        self.assertIn("gap.explained_torch", first)
        # An entry is a check or a family, not the beginning of a name.
        self.assertEqual([plans.plan_of(name)[0] for name in ("torch.names_gpt", "torch.names_gpt_compiled")], [2, 3])
        self.assertEqual(plans.plan_of("new.check")[0], plans.LAST)

    def test_times_are_told_of_plans_that_ran(self):
        results = [{"name": "facts.machine", "seconds": 1.5}, {"name": "table.sizes", "seconds": 30.0},
                   {"name": "table.costs", "late": True}, {"name": "views.commands", "verdict": "skip"}]
        (line,) = plans.times(results)
        self.assertEqual(line, "plan 1: 2 checks took 32 s of 540 s, the longest table.sizes with 30 s; no time for table.costs")


class Readings(unittest.TestCase):
    """The bytes of a process that a check uses."""

    def made(self, folder, list_of_processes, device):
        machine = Machine(folder, folder, dry=False)
        found = Test(machine, CHECKS["sizes.sweep"], Result(CHECKS["sizes.sweep"], Path(folder) / "result.json"))

        class Nvml:
            used = staticmethod(list_of_processes)

            def memory(self):
                return {"used": next(device)}

        found._nvml = Nvml()
        return found

    def test_the_list_counts_where_there_is_one(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "listed.txt").write_text("True")
            found = self.made(folder, {7: 100}.get, iter(()))
            self.assertEqual((found.used(7), found.used(8)), (100, None))

    def test_the_devices_change_counts_where_no_process_is_listed(self):
        def refused(pid):
            raise Error("nvmlDeviceGetComputeRunningProcesses_v3", 4)

        for processes in ({}.get, {7: None}.get, refused):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "listed.txt").write_text("False")
                found = self.made(folder, processes, iter([500, 500, 530, 570, 570]))
                found.machine.built["driver"] = "there"
                found.before_any_program()
                self.assertEqual(found.used(7), 70, "read until two readings agree")
                self.assertTrue(any("does not list" in note for note in found.result.data["notes"]))

    def test_versions_of_libraries_are_numbers(self):
        paths = ["/a/libcupti.so.12", "/b/libcupti.so.11.8", "/c/libcupti.so.9"]
        self.assertEqual(max(paths, key=library_version), "/a/libcupti.so.12")
        self.assertEqual(library_version("/a.so.1/libcupti.so.2025.3.1"), (2025, 3, 1))

    @unittest.skipUnless(os.environ.get("GPU_SUITE_FAKE"), "GPU_SUITE_FAKE: no simulated GPU was built")
    def test_a_machine_that_lists_nobody_gives_the_same_numbers(self):
        names, found = ["sizes.sweep", "sizes.many", "gap.context", "gap.limits", "gap.local_memory"], []
        with tempfile.TemporaryDirectory() as folder:
            for keys in ([], ["--keys", "nvml.wsl=1"], ["--keys", "fault_list=not_supported"]):
                done = subprocess.run([sys.executable, HERE / "run.py", "--dry-run", "--bin", folder, "--fake",
                                       os.environ["GPU_SUITE_FAKE"], "--out", Path(folder) / "out", *keys, "--only", *names],
                                      env=dict(os.environ, TMPDIR=folder), capture_output=True, text=True, timeout=120)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                results = json.loads((Path(folder) / "out" / "results.json").read_text())["results"]
                found.append({(r["name"], name): m["value"] for r in results for name, m in r["measured"].items()
                              # Without a context, a process that is not listed still has the device's change, which is 0.
                              if name not in ("listed after cuInit", "left after the release of the first", "seconds")})
        self.assertGreater(len(found[0]), 30)
        self.assertEqual(found[1], found[0])
        self.assertEqual(found[2], found[0])


class Questions(unittest.TestCase):
    def test_each_has_a_check_and_no_check_names_another(self):
        asked = {number for c in CHECKS.values() for number in c.questions}
        self.assertEqual(asked, set(questions.QUESTIONS))

    def test_answers_and_silence_are_told(self):
        results = [{"name": "a.b", "verdict": "pass", "reason": None, "questions": [5],
                    "answers": [{"question": 5, "text": "Two."}]},
                   {"name": "c.d", "verdict": "skip", "reason": "no tool", "questions": [5, 9], "answers": []}]
        lines = questions.answers(results)
        self.assertEqual(len(lines), 2)
        self.assertIn("Two. (a.b)", lines[0])
        self.assertTrue(lines[1].endswith("**No answer** [c.d: skip, no tool]"), lines[1])


class Costs(unittest.TestCase):
    def test_the_committed_file_has_evidence_for_every_cost(self):
        costs = table.parse(COSTS.read_text())
        self.assertGreater(len(costs), 20)
        for key, (_, evidence) in costs.items():
            self.assertRegex(evidence, "^(documented|assumed|measured on .+, driver .+): ", key)

    def test_lines(self):
        self.assertEqual(table.parse("# x\n\n a.b = 3M # why\nc=7"), {"a.b": (3 * MIB, "why"), "c": (7, "")})
        self.assertRaisesRegex(ValueError, "line 2", table.parse, "a = 1\nb : 2")
        self.assertEqual([table.written("cost.granule", v) for v in (0, 512, 1024, 3 * MIB, 1 << 30)],
                         ["0", "512", "1K", "3M", "1G"])
        self.assertEqual(table.written("threads", 2048), "2048", "threads are not bytes")

    def test_what_was_not_measured_stays_as_it_was(self):
        base = COSTS.read_text()
        text = table.write(base, {"cost.stream": (20480, "100 of them")}, "measured on X, driver 1")
        old, new = table.parse(base), table.parse(text)
        self.assertEqual(new.pop("cost.stream"), (20480, "measured on X, driver 1: 100 of them"))
        del old["cost.stream"]
        self.assertEqual(new, old)
        self.assertRaises(ValueError, table.write, base, {"cost.unheard": (1, "")}, "x")

    def test_costs_follow_from_rows(self):
        rows = [row("table.sizes", p, size=s, first=True) for s, p in ((1, 65536), (100000, 131072))]
        rows += [row("table.sizes", 0, size=1, probe=True), row("table.sizes", 65536, size=100000, probe=True)]
        rows += [row("table.pools", 9, size=s, reserved=r) for s, r in ((1, 4 * MIB), (5 * MIB, 8 * MIB))]
        rows += [row("table.limits", p, limit_kind="printf", limit=v, when=w)
                 for v, w, p in ((MIB, "the limit", 0), (MIB, "a module", MIB // 2), (3 * MIB, "a module", MIB + MIB // 2))]
        rows.append(dict(row("table.small", 1000, many="stream", each=100), result=801))
        found = table.fit(rows)
        self.assertEqual({k: v for k, (v, _) in found.items()},
                         {"cost.granule": 65536, "cost.small_limit": 100000, "cuda.pool_step": 4 * MIB,
                          "cost.printf_percent": 50})
        self.assertIn("a module", found["cost.printf_percent"][1])

    @unittest.skipUnless(os.environ.get("GPU_SUITE_FAKE"), "GPU_SUITE_FAKE: no simulated GPU was built")
    def test_the_simulated_gpu_charges_what_the_table_says(self):
        """Measures a machine with odd costs; a machine built from the measured table charges the same for every
        call."""
        odd = {"context": 300 << 20, "context_next": 100 << 20, "cost.green_context": 4 << 20, "processors": 80,
               "threads": 1536, "cost.granule": 128 << 10, "cost.small_limit": 40000, "cost.small_unit": 1024,
               "cuda.pool_step": 6 << 20, "cost.module_overhead": 8192, "cost.module_granule": 64 << 10,
               "cost.stack_percent": 50, "cost.heap_percent": 200, "cost.stream": 3000, "cost.event": 700,
               "cost.graph_exec": 10000, "cost.peer": 1 << 20}
        with tempfile.TemporaryDirectory() as folder:
            first = Path(folder) / "odd.txt"
            first.write_text(table.write(COSTS.read_text(), {k: (v, "odd") for k, v in odd.items()}, "made up"))
            rows = []
            for name, costs in (("one", first), ("two", Path(folder) / "one" / "costs.txt")):
                done = subprocess.run([sys.executable, HERE / "run.py", "--dry-run", "--bin", folder, "--fake",
                                       os.environ["GPU_SUITE_FAKE"], "--out", Path(folder) / name, "--costs", costs, "--only",
                                       "table."], env=dict(os.environ, TMPDIR=folder), capture_output=True, text=True,
                                      timeout=120)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                found = json.loads((Path(folder) / name / "table.json").read_text())["rows"]
                rows.append([(r["call"], r["weight"], r["device"]) for r in found
                             if not r["call"].startswith(("vmm_im", "ipc_"))])  # these name processes
            written = table.parse((Path(folder) / "one" / "costs.txt").read_text())
        self.assertGreater(len(rows[0]), 300)
        self.assertEqual(rows[0], rows[1])
        exact = [k for k in odd if not k.startswith(("cost.stream", "cost.event", "cost.graph_exec"))]
        # The limit is within one unit of the measurable value.
        exact.remove("cost.small_limit")
        self.assertEqual({k: written[k][0] for k in exact}, {k: odd[k] for k in exact})
        self.assertLess(abs(written["cost.small_limit"][0] - odd["cost.small_limit"]), 1024)


HOSTILE = '''
import os, subprocess, sys, time
from suite.check import Skip, check

@check("self.good", "c", "w")
def good(t):
    t.measure("x", 1)
    t.expect(1 == 1, "arithmetic holds")

@check("self.crash", "c", "w")
def crash(t):
    t.measure("before the crash", 1)
    os.abort()

@check("self.hang", "c", "w", seconds=10)
def hang(t):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    t.measure("child", child.pid)
    time.sleep(600)

@check("self.throw", "c", "w")
def throw(t):
    raise KeyError("no such thing")

@check("self.miss", "c", "w")
def miss(t):
    t.expect(False, "the moon is cheese")

@check("self.skip", "c", "w")
def skip(t):
    raise Skip("not today")

@check("self.needs", "c", "w", needs=("moonlight",))
def needs(t):
    pass

@check("self.measure", "c", "w")
def measure(t):
    t.measure("y", 2)
'''


class Isolation(unittest.TestCase):
    def test_whatever_one_check_does_the_others_have_their_results(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "hostile.py").write_text(HOSTILE)
            out = Path(folder) / "out"
            environment = dict(os.environ, GPU_SUITE_CHECKS="hostile", PYTHONPATH=folder, TMPDIR=folder)
            done = subprocess.run([sys.executable, HERE / "run.py", "--bin", folder, "--out", out, "--only", "self."],
                                  env=environment, capture_output=True, text=True, timeout=120)
            results = json.loads((out / "results.json").read_text())["results"]
            produced = sorted(p.name for p in out.iterdir())
        found = {r["name"]: r for r in results}
        verdicts = {name: r["verdict"] for name, r in found.items()}
        self.assertEqual(verdicts, {"self.good": "pass", "self.crash": "fail", "self.hang": "fail", "self.throw": "fail",
                                    "self.miss": "fail", "self.skip": "skip", "self.needs": "skip",
                                    "self.measure": "measured"}, done.stdout + done.stderr)
        self.assertEqual(done.returncode, 1)
        self.assertIn("before the crash", found["self.crash"]["measured"])
        self.assertIn("longer than 10 s", found["self.hang"]["reason"])
        self.assertIn("moon", found["self.miss"]["reason"])
        child = found["self.hang"]["measured"]["child"]["value"]
        self.assertFalse(Path(f"/proc/{child}").exists(), "what a check left behind is ended")
        self.assertLessEqual(len(produced), 8, "only a few files may come back")


if __name__ == "__main__":
    unittest.main()
