"""The suite's own reader of recordings, independent of wire/src/frame.rs and codec.rs, so that an error there cannot
hide itself. It parses the records that the checks need and skips the others."""

import struct
from collections import Counter, defaultdict

MAGIC = b"GPUMEMR\n"
SLOT = struct.Struct("<5Q4I2H4B")
FIELDS = ("seq", "time_ns", "address", "bytes", "aux", "tag", "stack", "thread", "context", "module", "result",
          "kind", "device", "flags", "detail")
KINDS = {
    1: "Hello", 2: "ClockAnchor", 3: "Device", 4: "Tag", 5: "Module", 7: "Origin", 16: "AllocEnd", 17: "FreeBegin",
    18: "FreeEnd", 19: "AllocFailed", 20: "Import", 21: "Baseline", 24: "PoolCreate", 25: "PoolState",
    26: "PoolDestroy", 32: "VmmCreate", 33: "VmmMap", 34: "VmmUnmap", 35: "VmmRetain", 36: "VmmRelease",
    40: "ContextCreate", 41: "ContextDestroy", 64: "DriverEvent", 72: "Step", 80: "Lost", 81: "Watermark", 84: "Bye",
    85: "Agent", 97: "DeviceSample", 98: "ProcessSample", 99: "SampleEnd", 101: "ProcessGone",
}
MEMORY = {1: "device", 2: "pitched", 3: "array", 4: "stream", 5: "vmm", 16: "managed", 17: "pinned", 18: "registered",
          19: "imported", 20: "host_vmm"}
AGENT = {1: "covered", 2: "late", 3: "blocked", 4: "paused", 5: "disarmed"}


class Record(dict):
    """One record; its fields as attributes."""

    __getattr__ = dict.__getitem__


def read(data):
    """Every whole record of a recording."""
    if data[:8] != MAGIC:
        raise ValueError("not a recording")
    at = 16
    while at + 4 + SLOT.size <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        if length < SLOT.size or at + 4 + length > len(data):
            return
        record = Record(zip(FIELDS, SLOT.unpack_from(data, at + 4)))
        record["payload"] = data[at + 4 + SLOT.size : at + 4 + length]
        record["name"] = KINDS.get(record.kind, str(record.kind))
        yield record
        at += 4 + length


class Account:
    """Live memory according to an agent's recording, replayed by simple rules."""

    def __init__(self, records):
        self.tags, self.devices, self.pools = {0: ""}, {}, {}
        self.live, self.handles, self.mappings, self.pending = {}, {}, {}, {}
        self.counts, self.failed, self.events, self.imports = Counter(), [], [], {}
        self.states, self.hello, self.lost, self.odd, self.bye = [], None, 0, 0, False
        self.last_seq, self.holes, self.peak = 0, 0, 0
        for record in records:
            self.take(record)

    @classmethod
    def of_file(cls, path):
        with open(path, "rb") as file:
            return cls(read(file.read()))

    def take(self, r):
        self.counts[r.name] += 1
        if r.seq and not r.flags & 1:
            if self.last_seq and r.seq > self.last_seq + 1:
                self.holes += r.seq - self.last_seq - 1
            self.last_seq = max(self.last_seq, r.seq)
        handler = getattr(self, "on_" + r.name, None)
        if handler:
            handler(r)
        if r.name in ("AllocEnd", "VmmCreate", "PoolState"):
            self.peak = max(self.peak, self.tracked())

    def on_Hello(self, r):
        self.hello = r

    def on_Tag(self, r):
        self.tags[r.tag] = r.payload.decode()

    def on_Device(self, r):
        high, low = f"{r.address:016x}", f"{r.aux:016x}"
        self.devices[r.device] = f"GPU-{high[:8]}-{high[8:12]}-{high[12:]}-{low[:4]}-{low[4:]}"

    def on_Agent(self, r):
        self.states.append((AGENT.get(r.detail, "?"), r.result, r.payload.decode(errors="replace")))

    def on_AllocEnd(self, r):
        if r.address in self.live:
            self.odd += 1
        self.live[r.address] = r

    def on_AllocFailed(self, r):
        self.failed.append(r)

    def on_FreeBegin(self, r):
        found = self.live.pop(r.address, None) or self.imports.pop(r.address, None)
        # A free of an unknown address: refused by the driver, or a contradiction.
        self.pending[r.seq] = ("alloc", r.address, found)

    def on_Import(self, r):
        self.imports[r.address] = r

    def on_VmmCreate(self, r):
        self.handles[r.address] = [r, r.result or 1, 0]

    def on_VmmMap(self, r):
        self.mappings[r.address] = (r.aux, r.bytes)
        if r.aux in self.handles:
            self.handles[r.aux][2] += 1

    def on_VmmUnmap(self, r):
        inside = {a: m for a, m in self.mappings.items() if r.address <= a < r.address + r.bytes}
        for address, (handle, _) in inside.items():
            del self.mappings[address]
            self.change(handle, 0, -1)
        self.pending[r.seq] = ("unmap", r.address, inside)

    def on_VmmRetain(self, r):
        self.change(r.aux, 1, 0)

    def on_VmmRelease(self, r):
        self.change(r.address, -1, 0)
        self.pending[r.seq] = ("release", r.address, None)

    def change(self, handle, references, mappings):
        if handle in self.handles:
            row = self.handles[handle]
            row[1] += references
            row[2] += mappings

    def on_FreeEnd(self, r):
        kind, address, what = self.pending.pop(r.aux, (None, None, None))
        if not r.result and kind == "alloc" and what is None:
            self.odd += 1
        if not r.result or kind is None:
            return
        if kind == "alloc":
            if what is not None:
                self.live[address] = what
        elif kind == "unmap":
            for at, mapping in what.items():
                self.mappings[at] = mapping
                self.change(mapping[0], 0, 1)
        else:
            self.change(address, 1, 0)

    def on_PoolCreate(self, r):
        self.pools[r.address] = {"owner": r.detail, "reserved": 0, "used": 0}

    def on_PoolState(self, r):
        self.pools.setdefault(r.address, {"owner": 0})
        self.pools[r.address].update(reserved=r.bytes, used=r.aux)

    def on_PoolDestroy(self, r):
        self.pools.pop(r.address, None)

    def on_ContextDestroy(self, r):
        same = (lambda row: row.context == r.context) if r.detail == 1 else (lambda row: row.device == r.device)
        self.live = {a: row for a, row in self.live.items() if not same(row)}

    def on_DriverEvent(self, r):
        self.events.append(r)

    def on_Lost(self, r):
        self.lost += r.bytes

    def on_Bye(self, r):
        self.bye = True

    # sums of the live rows

    def bytes_by_kind(self):
        sums = defaultdict(int)
        for row in self.live.values():
            sums[MEMORY.get(row.detail, "?")] += row.bytes
        for row, references, mappings in self.handles.values():
            if references > 0 or mappings > 0:
                sums[MEMORY.get(row.detail, "?")] += row.bytes
        for row in self.imports.values():
            sums["imported"] += row.bytes
        return dict(sums)

    def tracked(self):
        """Requested bytes of direct allocations, bytes of handles, reserved bytes of driver pools."""
        kinds = self.bytes_by_kind()
        pools = sum(p["reserved"] for p in self.pools.values() if p["owner"] in (1, 2))
        return sum(kinds.get(k, 0) for k in ("device", "pitched", "array", "vmm")) + pools

    def bytes_by_tag(self):
        sums = defaultdict(int)
        alive = [row for row, references, mappings in self.handles.values() if references > 0 or mappings > 0]
        for row in [r for r in self.live.values() if r.detail < 16] + alive:
            sums[self.tags.get(row.tag, f"?{row.tag}")] += row.bytes
        return dict(sums)
