"""The least that any reader of a TBD log does, as plain Python: sums per tag, and nvidia-smi's readings.

    python3 tests/data/tbd_reader.py LOG
"""

import re
import sys

ALLOCATION = re.compile(r"Allocate (\d+) bytes GPU memory \((.*)\)")
DEVICE = re.compile(r"(\d+) MB GPU global memory free, total (\d+) MB")
READING = re.compile(r"-pid_(\d+)=(\d+)")

records = total = readings = devices = 0
tags = {}
with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
    for line in log:
        if "Allocate" in line:
            match = ALLOCATION.search(line)
            if match:
                records += 1
                total += int(match[1])
                tags[match[2]] = tags.get(match[2], 0) + int(match[1])
        elif "GPU global memory" in line:
            devices += DEVICE.search(line) is not None
        elif "Memory Usage:" in line:
            readings += len(READING.findall(line))
print(records, total, len(tags), devices, readings)
