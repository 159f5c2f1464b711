"""The call table: driver calls weighed by NVML, and the costs that follow from them, in the format that both people and
tests/fake-gpu read: `KEY = VALUE  # evidence` (tests/fake-gpu/costs.txt has every key)."""

import json
import math
import re
import time

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Keys whose value is not a number of bytes.
PLAIN = ("processors", "threads", "cost.stack_percent", "cost.printf_percent", "cost.heap_percent")
LINE = re.compile(r"^\s*([\w.]+)\s*=\s*(\d+)([KMG]?)\s*(?:#\s*(.*?))?\s*$")
MIB = 1 << 20


class Table:
    """The rows of one check. Each process is a fresh one; its rows are kept when it ends."""

    def __init__(self, test):
        self.test, self.rows = test, []
        self.folder = test.machine.work / "table"
        self.folder.mkdir(exist_ok=True)

    def process(self, context=True, **environment):
        return Weighed(self, context, environment)

    def weigh(self, name, *call, **facts):
        """One call, alone in a process."""
        with self.process() as process:
            return process.weigh(name, *call, **facts)

    def save(self):
        (self.folder / f"{self.test.check.name}.json").write_text(json.dumps(self.rows, indent=1))


class Weighed:
    """A process whose calls are measured one by one, by NVML's charge to it and by the device's used memory."""

    def __init__(self, table, context, environment):
        self.table, self.test = table, table.test
        self.driver = self.test.driver(**environment)
        self.driver.do("init")
        self.facts = self.driver.do("device", 0)
        if context:
            self.driver.do("context")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.table.save()
        if self.driver.alive():
            self.driver.kill()

    def state(self):
        used = self.test.settled(lambda: self.test.listed_used(self.driver.pid))
        device = self.test.device_used()
        if used is None:  # not listed (yet, or ever): the device's own word must have settled
            for _ in range(20):
                time.sleep(0 if self.test.dry else 0.005)
                last, device = device, self.test.device_used()
                if last == device:
                    break
        return used, device

    def weigh(self, name, *call, quiet=False, **facts):
        """Measures the charge of one call.

        `process` is absent if NVML lists the process neither before nor after; an unlisted process held nothing.
        `weight` is the
        relevant value: that of the process, or of the device if NVML does not show our processes (in a container).
        """
        (before, device_before), answer = self.state(), self.driver.ask(*call)
        after, device_after = self.state()
        row = {"check": self.test.check.name, "name": name, "call": " ".join(map(str, call)), "result": answer["result"],
               "process": None if after is None and before is None else (after or 0) - (before or 0),
               "device": device_after - device_before}
        row["weight"] = row["device"] if row["process"] is None else row["process"]
        for key in ("bytes", "count", "value", "granularity", "id", "error"):
            if key in answer:
                row[key] = answer[key]
        row.update(facts)
        self.table.rows.append(row)
        if not quiet:
            self.test.measure(name, {k: v for k, v in row.items() if k in ("process", "device", "bytes") or k in facts
                                     or (k == "result" and v)}, "B")
        return row


# ---- from rows to costs ----


def common(values):
    """Returns the greatest common divisor of the values; None without values."""
    found = 0
    for value in values:
        found = math.gcd(found, abs(value))
    return found or None


def good(rows, check, **wanted):
    """Rows of a check whose call worked."""
    return [r for r in rows if r["check"] == check and not r["result"] and all(r.get(k) == v for k, v in wanted.items())]


def limit_percent(rows, kind, scale=1):
    """Returns the charged percentage of a limit, from the smallest and largest setting: (percent, included costs)."""
    totals, came = {}, set()
    for row in rows:
        if row.get("limit_kind") == kind:
            totals[row["limit"]] = totals.get(row["limit"], 0) + row["weight"]
            if row["weight"]:
                came.add(row["when"])
    if len(totals) < 2:
        return None, came
    low, high = min(totals), max(totals)
    return round(100 * (totals[high] - totals[low]) / ((high - low) * scale)), came


def fit(rows):
    """Returns {key: (value, evidence)} for every cost that follows from the rows."""
    found = {}

    def take(key, value, how):
        if value is not None:
            found[key] = (int(value), how)

    sizes = good(rows, "table.sizes")
    granule = common(r["weight"] for r in sizes)
    take("cost.granule", granule, f"{len(sizes)} allocations are multiples")
    apart = [r["size"] for r in sizes if r.get("probe") and r["weight"]]
    together = [r["size"] for r in sizes if r.get("probe") and not r["weight"]]
    if apart and together and max(together) < min(apart):
        take("cost.small_limit", min(apart), f"{max(together)} B share a granule, {min(apart)} B do not")
    fill = next((r for r in rows if r.get("fill")), None)
    if fill and granule and fill["fill"][1]:
        # A new granule began between two readings, so the unit is the power of two in that range.
        unit = 1 << round(math.log2(granule / fill["fill"][1]))
        take("cost.small_unit", max(unit, 512), f"{fill['fill'][0]} to {fill['fill'][1]} pieces of a byte in a granule")
    handle = next(iter(good(rows, "table.handles", made=1)), None)
    take("cost.vmm_granule", handle and handle.get("granularity"), "cuMemGetAllocationGranularity")

    grown = [(r["size"], r["reserved"]) for r in rows if r.get("reserved") and "size" in r]
    if grown:
        step = min(grown)[1]
        fits = all(reserved == -(-size // step) * step for size, reserved in grown)
        take("cuda.pool_step", step, f"{len(grown)} sizes" if fits else f"but not every growth is a multiple: {grown}")

    for name, key in (("first", "context"), ("next", "context_next"), ("green", "cost.green_context")):
        row = next(iter(good(rows, "table.contexts", context=name)), None)
        take(key, row and row["weight"], "one context")
    facts = next((r["facts"] for r in rows if r.get("facts")), {})
    take("processors", facts.get("processors"), "cuDeviceGetAttribute 16")
    take("threads", facts.get("threads_per_processor"), "cuDeviceGetAttribute 39")

    modules = good(rows, "table.modules", loading="EAGER")
    take("cost.module_granule", common(r["weight"] for r in modules if r.get("loaded")), f"{len(modules)} modules")
    small = next(iter(good(rows, "table.modules", small=True)), None)
    take("cost.module_overhead", small and max(small["weight"], 0) // small["modules"],
         small and f"{small['modules']} empty modules together")

    limits = good(rows, "table.limits")
    resident = facts.get("processors", 0) * facts.get("threads_per_processor", 0)
    for kind, default, key, scale in (("stack", "cost.stack_default", "cost.stack_percent", resident),
                                      ("printf", "cost.printf_default", "cost.printf_percent", 1),
                                      ("heap", "cost.heap_default", "cost.heap_percent", 1)):
        asked = next((r for r in limits if r.get("default_of") == kind), None)
        take(default, asked and asked["value"], "cuCtxGetLimit")
        percent, came = limit_percent(limits, kind, scale) if scale else (None, ())
        take(key, percent, f"came with {', '.join(sorted(came)) or 'nothing'}")

    for kind in ("stream", "event", "graph_exec", "peer"):
        row = next(iter(good(rows, "table.small", many=kind)), None)
        take(f"cost.{kind}", row and max(row["weight"], 0) // row["each"], row and f"{row['each']} of them")
    return found


# ---- the file ----


def parse(text):
    """Returns {key: (value, evidence)}; raises ValueError with the line and the expected form."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.split("#")[0].strip():
            continue
        match = LINE.match(line)
        if not match:
            raise ValueError(f"line {number}: {line.strip()[:60]!r} is not `KEY = VALUE  # evidence`")
        found[match[1]] = (int(match[2]) * UNITS.get(match[3], 1), match[4] or "")
    return found


def written(key, value):
    if value and key not in PLAIN:
        for unit in "GMK":
            if value % UNITS[unit] == 0:
                return f"{value // UNITS[unit]}{unit}"
    return str(value)


def write(base, found, provenance):
    """Returns the base table with measured values; other values keep their value and evidence."""
    known = parse(base)
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"no such cost in the base: {', '.join(unknown)}")
    out = []
    for line in base.splitlines():
        match = LINE.match(line)
        if match and match[1] in found:
            value, how = found[match[1]]
            line = f"{match[1]} = {written(match[1], value)}".ljust(29) + f"# {provenance}: {how}"
        out.append(line)
    return "\n".join(out) + "\n"
