"""Definition of a check, and the context it receives."""

import json
import os
import shutil
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from . import wire
from .daemon import Daemon
from .nvml import Error as NvmlError
from .nvml import Nvml
from .programs import Driver, Ended, Program

CHECKS = {}


class Skip(Exception):
    """The check cannot run here; holds the reason."""


@dataclass
class Check:
    name: str
    claim: str
    where: str
    run: object
    needs: tuple
    seconds: int
    keys: tuple = field(default=())  # of the simulated machine in a dry run
    questions: tuple = field(default=())  # of reference/cupti.md 12 that it settles


def check(name, claim, where, needs=(), seconds=60, keys=(), questions=()):
    """Registers a check. `needs`: keys of Machine.can that it requires. A missing one skips it with that reason."""

    def register(function):
        assert name not in CHECKS, name
        CHECKS[name] = Check(name, claim, where, function, tuple(needs), seconds, tuple(keys), tuple(questions))
        return function

    return register


class Test:
    """Context of a check: the machine, a folder, its result, and programs that end with it."""

    __test__ = False

    def __init__(self, machine, check, result):
        self.machine, self.check, self.result = machine, check, result
        self.home = machine.work / "checks" / check.name
        self.home.mkdir(parents=True, exist_ok=True)
        (machine.work / "recordings").mkdir(exist_ok=True)
        self.dry = machine.dry
        self.open, self.count, self._nvml, self._listed, self._base = [], 0, None, None, None
        if machine.dry:
            machine.new_simulated_machine(self.home, *check.keys)
            # For NVML in this process; the library itself was found by LD_LIBRARY_PATH, which run.py has set.
            os.environ["GPUMEM_SIM"] = str(self.home / "machine")
        self.measure, self.note, self.expect, self.answer = result.measure, result.note, result.expect, result.answer

    def times(self, real, dry):
        """Returns the number of repetitions. A dry run only tests that the check works, not its cost."""
        return dry if self.dry else real

    @property
    def nvml(self):
        if self._nvml is None:
            self._nvml = Nvml()
        return self._nvml

    @property
    def library(self):
        return self.machine.program("libgpumem.so")

    def environment(self, agent=None, **more):
        """Returns a program's environment. `agent`: None (no agent), a daemon to report to, or a path to record into."""
        found = self.machine.environment(self.home)
        found["GPUMEM_SITES"] = "0"  # what a check does not name has no name
        if agent is not None:
            found["GPUMEM_EXIT_WAIT_MS"] = "10000"  # on a busy machine the recording of a short program is late; else nothing waits
            found["CUDA_INJECTION64_PATH"] = str(self.library)
            found["NVTX_INJECTION64_PATH"] = str(self.library)
            if isinstance(agent, Daemon):
                found["GPUMEM_SOCKET"] = str(agent.agent_socket)
            else:
                found["GPUMEM_RECORD"] = str(agent)
        return dict(found, **{k: str(v) for k, v in more.items()})

    def log(self, name):
        self.count += 1
        return self.home / f"{self.count:02}-{name}.log"

    def keep(self, thing):
        self.open.append(thing)
        return thing

    def driver(self, agent=None, before=(), **more):
        self.before_any_program()
        command = [*before, self.machine.built["driver"]]
        return self.keep(Driver(command, self.environment(agent, **more), self.log("driver")))

    def program(self, command, agent=None, cwd=None, **more):
        self.before_any_program()
        name = Path(str(command[0])).name
        return self.keep(Program(command, self.environment(agent, **more), self.log(name), cwd))

    def daemon(self, more=""):
        return self.keep(Daemon(self.machine, self.home, self.environment(), more)).start()

    def recording(self, name="agent"):
        return self.home / f"{name}.gpumem"

    def account(self, path):
        if not path.exists():
            raise Ended("the agent recorded nothing: it is not in the process, or could not write")
        return wire.Account.of_file(path)

    def publish(self, path, name, expectations):
        """Keeps a recording with the expected results of its replay, for the packs and then for the repository."""
        target = self.machine.work / "recordings" / f"{name}.gpumem"
        shutil.copyfile(path, target)
        where = "simulated GPU" if self.dry else self.nvml.facts()
        target.with_suffix(".json").write_text(json.dumps(
            {"check": self.check.name, "machine": where, **expectations}, indent=1))

    @property
    def listed(self):
        """Whether NVML lists the suite's processes with their bytes; in some containers it does not. Tested once for each
        run, with a process that has a context."""
        if self._listed is None:
            known = self.machine.work / "listed.txt"
            if not known.exists():
                known.write_text(str(self.look_for_listing()))
            self._listed = known.read_text() == "True"
            if not self._listed:
                self.note("NVML does not list the processes: their bytes are what the device's have changed by")
        return self._listed

    def look_for_listing(self):
        if "driver" not in self.machine.built:
            return True
        d = self.driver()
        d.begin()
        deadline = time.monotonic() + 2
        while self.listed_used(d.pid) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        found = self.listed_used(d.pid) is not None
        d.finish()
        return found

    def listed_used(self, pid):
        """Returns a process's bytes in NVML's list; None if it is not listed, or listed without a number."""
        try:
            return self.nvml.used(pid)
        except NvmlError:
            return None

    def device_used(self):
        return self.nvml.memory()["used"]

    def used(self, pid):
        """Returns the bytes that NVML charges to a process.

        If NVML does not list processes, this is the change of the device's bytes since the check started. Then nothing
        else may
        use the GPU, and only differences around one call belong to a process.
        """
        if self.listed:
            return self.settled(lambda: self.listed_used(pid))
        return self.settled(self.device_used) - self._base

    def settled(self, read):
        """Repeats a reading until two in a row agree, at most 51 times; returns the last."""
        last = read()
        for _ in range(50):
            time.sleep(0 if self.dry else 0.005)
            now = read()
            if now == last:
                return now
            last = now
        return last

    def before_any_program(self):
        """The device's bytes before the check's first process; read only where they are needed."""
        if self._base is None and "driver" in self.machine.built:
            self._base = 0  # the programs of `listed` come here, too
            if not self.listed:
                self._base = self.settled(self.device_used)

    def close(self):
        for thing in reversed(self.open):
            try:
                (thing.close if isinstance(thing, Daemon) else thing.kill)()
            except Exception:
                self.note(traceback.format_exc())


def missing(machine, check):
    """Returns the reason why a check cannot run here, or None."""
    reasons = (machine.can.get(need, f"{need} was not tested") for need in check.needs)
    return next((why for why in reasons if why is not None), None)


def run_one(machine, name, result):
    """Runs a check and stores its verdict. An exception also gives a verdict."""
    chosen, test = CHECKS[name], None
    try:
        test = Test(machine, chosen, result)
        chosen.run(test)
        verdict = (None, None)
    except Skip as skip:
        verdict = ("skip", str(skip))
    except Exception as error:
        result.note(traceback.format_exc())
        verdict = ("fail", f"{type(error).__name__}: {error}")
    finally:
        if test:
            test.close()
    return result.end(*verdict)
