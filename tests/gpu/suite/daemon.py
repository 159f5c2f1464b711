"""A daemon of the suite's own: its configuration, its control socket, its metrics."""

import http.client
import json
import re
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

from .programs import Ended, Program, until


class OverUnix(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path, timeout=10):
        super().__init__("localhost", timeout=timeout)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Daemon:
    """gpumemd with everything in one folder. `start` may be called again after a kill: the same folder, a new recording."""

    def __init__(self, machine, home, environment, more=""):
        self.machine, self.home, self.environment, self.more = machine, Path(home), environment, more
        # The path of a socket holds 107 bytes: the folder of a check may be too long for one.
        self.runtime = Path(tempfile.mkdtemp(prefix="gpumem-s-", dir="/tmp"))
        self.runtime.chmod(0o755)
        self.port, self.starts, self.program = free_port(), 0, None
        self.recordings = []

    def start(self):
        self.starts += 1
        recording = self.home / f"daemon-{self.starts}.gpumem"
        config = self.home / f"daemon-{self.starts}.toml"
        config.write_text(
            f'runtime_dir = "{self.runtime}"\nrecord = "{recording}"\n{self.more}\n'
            f'[runs]\nstore = "{self.home / "runs.sqlite"}"\n[metrics]\nlisten = "127.0.0.1:{self.port}"\nfold_younger_s = 0.0\n')
        self.recordings.append(recording)
        command = [self.machine.program("gpumemd"), "--config", config]
        began = time.monotonic()
        self.program = Program(command, self.environment, self.home / f"daemon-{self.starts}.log")
        until(15, "an answering daemon", self.answers)
        self.ready_s = time.monotonic() - began
        return self

    def answers(self):
        if not self.program.alive():
            raise Ended(f"gpumemd ended with {self.program.wait(5)}: see daemon-{self.starts}.log")
        try:
            return self.get("/v1/doctor") is not None
        except (OSError, http.client.HTTPException):
            return False

    @property
    def pid(self):
        return self.program.pid

    @property
    def agent_socket(self):
        return self.runtime / "agent.sock"

    def get(self, path):
        connection = OverUnix(self.runtime / "control.sock")
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise Ended(f"GET {path}: {answer.status} {text[:200]!r}")
        return json.loads(text)

    def metrics(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            return answer.read().decode()
        finally:
            connection.close()

    def row(self, pid):
        """The process's row of `ps`, None if there is none."""
        return next((r for r in self.get("/v1/ps")["processes"] if r["pid"] == pid), None)

    def runs(self, pid):
        return self.get(f"/v1/runs?pid={pid}")

    def settled(self, pid, seconds=15, **wanted):
        """Waits until the process's row has these values; the row, or the last one that was seen, and whether it fits."""
        deadline, row = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            row = self.row(pid)
            if row and all(row.get(k) == v for k, v in wanted.items()):
                return row, True
            time.sleep(0.05)
        return row, False

    def stop(self):
        """By SIGTERM, as systemd does."""
        if self.program and self.program.alive():
            self.program.signal(signal.SIGTERM)
            try:
                return self.program.wait(15)
            except Ended:
                self.program.kill()
                raise
        return None

    def close(self):
        """Asks the program to end first, so that its recording is complete for analysing a failure."""
        if self.program:
            if self.program.alive():
                self.program.signal(signal.SIGCONT)
                self.program.signal(signal.SIGTERM)
                try:
                    self.program.wait(5)
                except Ended:
                    pass
            self.program.kill()
        shutil.rmtree(self.runtime, ignore_errors=True)


SERIES = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)$")


def parse_metrics(text):
    """[(name, labels, value)] of a Prometheus text."""
    found = []
    for line in text.splitlines():
        match = SERIES.match(line) if line and not line.startswith("#") else None
        if match:
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            found.append((match[1], labels, float(match[3])))
    return found
