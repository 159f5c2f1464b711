"""Runs another program, and prints its peaks as JSON when it ends, also with an error.

    measured.py FILE [ARGUMENT...]

With MEASURED_PLACES=N, it counts calls of modules and their parameters that are made, prints the count, and ends the program at number
N + 1, if N is not 0. So a program with a change ends where it ran out of memory without it.
"""

import atexit
import json
import os
import runpy
import sys

import torch
from torch.nn.modules import module

most = int(os.environ.get("MEASURED_PLACES", "0"))
places = 0


def print_peaks():
    free, total = torch.cuda.mem_get_info()
    figures = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "used": total - free,
        "pinned": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0),
        "places": places,
    }
    print("\n" + json.dumps(figures), flush=True)


def count(*_):
    global places
    # A checkpointed module is called again in the backward pass.
    if torch._C._current_graph_task_id() == -1:
        if most and places == most:
            sys.exit()
        places += 1


atexit.register(print_peaks)
if "MEASURED_PLACES" in os.environ:
    module.register_module_forward_pre_hook(count)
    module.register_module_parameter_registration_hook(count)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
