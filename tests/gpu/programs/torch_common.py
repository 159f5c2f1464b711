"""Shared by the PyTorch programs: JSON lines, and the agent's C API if the agent is loaded."""

import ctypes
import json
import os


def say(**facts):
    print(json.dumps(facts), flush=True)


def wait():
    """Waits for the suite's next line."""
    input()


class Agent:
    """The injected library; every call does nothing without it."""

    def __init__(self):
        path = os.environ.get("CUDA_INJECTION64_PATH")
        self.library = None
        if path:
            try:
                self.library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            except OSError:
                pass

    def call(self, name, *arguments):
        function = getattr(self.library, name, None) if self.library else None
        if function:
            function(*arguments)
        return function is not None

    def push(self, name):
        return self.call("gpumem_push", name.encode())

    def pop(self):
        return self.call("gpumem_pop")

    def pause(self):
        return self.call("gpumem_pause")

    def resume(self):
        return self.call("gpumem_resume")
