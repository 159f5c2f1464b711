"""Programs that the suite controls: the command-driven one, and any other through its output lines."""

import json
import os
import queue
import signal
import subprocess
import threading
import time


class Ended(Exception):
    """A program ended or sent nothing when a reply was due."""


def until(seconds, what, done):
    """Polls `done` until it returns a true value; fails with `what` after the timeout."""
    deadline = time.monotonic() + seconds
    while True:
        found = done()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Ended(f"not within {seconds} s: {what}")
        time.sleep(0.02)


class Program:
    """A process; its lines of standard output are read by a thread."""

    def __init__(self, command, environment, log, cwd=None):
        self.log = open(log, "ab")
        self.process = subprocess.Popen([str(c) for c in command], env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, cwd=cwd)
        self.pid = self.process.pid
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line.decode(errors="replace").rstrip("\n"))
        self.lines.put(None)

    def line(self, timeout=60):
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            raise Ended(f"{self.process.args[0]} sent nothing for {timeout} s") from None
        if line is None:
            raise Ended(f"{self.process.args[0]} ended with {self.process.wait(10)}")
        return line

    def say(self, text):
        try:
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            raise Ended(f"{self.process.args[0]} ended with {self.process.wait(10)}") from None

    def alive(self):
        return self.process.poll() is None

    def signal(self, number):
        os.kill(self.pid, number)

    def wait(self, timeout=60):
        """Its exit status, negative for a signal."""
        if self.process.stdin and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except OSError:
                pass
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Ended(f"{self.process.args[0]} did not end in {timeout} s") from None

    def kill(self):
        if self.alive():
            self.signal(signal.SIGKILL)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        self.log.close()


class Driver(Program):
    """programs/core.c: one command a line, one JSON object back."""

    def ask(self, command, *words, timeout=120):
        self.say(" ".join([command, *map(str, words)]))
        line = self.line(timeout)
        try:
            return json.loads(line)
        except ValueError:
            raise Ended(f"{command}: not an answer: {line[:200]}") from None

    def do(self, command, *words, timeout=120):
        """As ask, for what must succeed."""
        answer = self.ask(command, *words, timeout=timeout)
        if answer["result"]:
            raise Ended(f"{command} {' '.join(map(str, words))}: {answer}")
        return answer

    def begin(self, device=0):
        """Calls cuInit, selects the device, and makes its primary context. Returns the device's facts and cuInit's duration."""
        started = self.do("init")
        facts = self.do("device", device)
        self.do("context")
        return dict(facts, init_ns=started["ns"], agent=started["agent"])

    def books(self):
        """Returns live memory by kind: (count, bytes)."""
        found = self.do("books")
        return {k: tuple(v) for k, v in found.items() if isinstance(v, list)}

    def tracked(self, books=None):
        """Returns the tracked bytes (DESIGN.md) by the program's own accounts, without pools."""
        books = books or self.books()
        return sum(books[k][1] for k in ("device", "pitched", "array", "mipmap", "handle"))

    def finish(self, code=0):
        self.ask("exit", code)
        return self.wait()
