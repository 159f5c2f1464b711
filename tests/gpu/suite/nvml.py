"""The suite's own reading of NVML, for comparison with the daemon's."""

import ctypes as c

NOT_AVAILABLE = 2**64 - 1


class Memory(c.Structure):
    _fields_ = [("total", c.c_uint64), ("free", c.c_uint64), ("used", c.c_uint64)]


class Memory2(c.Structure):
    _fields_ = [("version", c.c_uint), ("total", c.c_uint64), ("reserved", c.c_uint64), ("free", c.c_uint64),
                ("used", c.c_uint64)]


class Process(c.Structure):
    _fields_ = [("pid", c.c_uint), ("used", c.c_uint64), ("gpu_instance", c.c_uint), ("compute_instance", c.c_uint)]


class Error(Exception):
    def __init__(self, function, code):
        super().__init__(f"{function}: {code}")
        self.code = code


class Nvml:
    """One device by NVML's index."""

    def __init__(self, index=0):
        self.library = c.CDLL("libnvidia-ml.so.1")
        self.call("nvmlInit_v2")
        self.device = c.c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", c.c_uint(index), c.byref(self.device))

    def call(self, name, *arguments):
        try:
            function = getattr(self.library, name)
        except AttributeError:
            raise Error(name, "not in this library") from None
        code = function(*arguments)
        if code:
            raise Error(name, code)

    def text(self, name, *before):
        out = c.create_string_buffer(128)
        self.call(name, *before, out, c.c_uint(128))
        return out.value.decode()

    def word(self, name, *, device=True):
        out = c.c_uint()
        self.call(name, *([self.device] if device else []), c.byref(out))
        return out.value

    def memory(self):
        memory = Memory2(version=0x02000028)
        try:
            self.call("nvmlDeviceGetMemoryInfo_v2", self.device, c.byref(memory))
            return {"total": memory.total, "used": memory.used, "free": memory.free, "reserved": memory.reserved}
        except Error:
            memory = Memory()
            self.call("nvmlDeviceGetMemoryInfo", self.device, c.byref(memory))
            return {"total": memory.total, "used": memory.used, "free": memory.free, "reserved": None}

    def processes(self):
        """Returns bytes by pid; ``None`` for a process whose bytes NVML does not report."""
        for size in (64, 1024):
            rows = (Process * size)()
            count = c.c_uint(size)
            try:
                self.call("nvmlDeviceGetComputeRunningProcesses_v3", self.device, c.byref(count), rows)
            except Error as error:
                if error.code == 7 and size == 64:
                    continue
                raise
            break
        told = {row.pid: row.used for row in rows[: count.value]}
        return {pid: None if used == NOT_AVAILABLE else used for pid, used in told.items()}

    def used(self, pid):
        """Returns the bytes charged to a process; ``None`` if it is not listed."""
        return self.processes().get(pid)

    def facts(self):
        cuda = c.c_int()
        self.call("nvmlSystemGetCudaDriverVersion_v2", c.byref(cuda))
        facts = {"cuda": f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"}
        texts = {"driver": ("nvmlSystemGetDriverVersion",), "nvml": ("nvmlSystemGetNVMLVersion",)}
        for name, words in texts.items():
            facts[name] = self.optional(lambda w=words: self.text(*w))
        facts["name"] = self.optional(lambda: self.text("nvmlDeviceGetName", self.device))
        facts["uuid"] = self.optional(lambda: self.text("nvmlDeviceGetUUID", self.device))
        for name in ("AccountingMode", "PersistenceMode", "ComputeMode"):
            facts[name] = self.optional(lambda n=name: self.word("nvmlDeviceGet" + n))
        facts["MigMode"] = self.optional(self.mig)
        return facts

    def mig(self):
        now, later = c.c_uint(), c.c_uint()
        self.call("nvmlDeviceGetMigMode", self.device, c.byref(now), c.byref(later))
        return now.value

    @staticmethod
    def optional(read):
        try:
            return read()
        except Error as error:
            return f"error {error.code}"
