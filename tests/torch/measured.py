"""Runs another program, and prints its peaks as JSON when it ends, also with an error.

    measured.py FILE [ARGUMENT...]
"""

import atexit
import json
import os
import runpy
import sys

import torch


def print_peaks():
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print("\n" + json.dumps({"allocated": allocated, "reserved": reserved}), flush=True)


atexit.register(print_peaks)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
