"""Allocates and frees at random, in one thread and in several, on two devices, partly used by other streams.

Settings of the allocator and a seed come from the command line."""

import gc
import random
import sys
import threading

import torch
from said import check, say

settings, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if settings:
    torch.cuda.memory._set_allocator_settings(settings)
streams = [torch.cuda.Stream("cuda:0") for _ in range(3)]


def work(seed, turns, mine):
    chance = random.Random(seed)
    for _ in range(turns):
        what = chance.random()
        if what < 0.5 or not mine:
            device = f"cuda:{chance.randrange(2)}"
            size = int(2 ** chance.uniform(4, 27))
            if chance.random() < 0.2:
                with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                    mine.append(torch.empty(size, dtype=torch.uint8, device=device))
            else:
                mine.append(torch.empty(size, dtype=torch.uint8, device=device))
        elif what < 0.93:
            gone = mine.pop(chance.randrange(len(mine)))
            if gone.device.index == 0 and chance.random() < 0.2:
                for stream in chance.sample(streams, chance.randrange(1, 4)):
                    gone.record_stream(stream)
            del gone
        elif what < 0.97:
            del mine[chance.randrange(len(mine)) :]
        elif what < 0.98:
            torch.cuda.empty_cache()
        elif what < 0.985:
            torch.cuda.synchronize()


chance = random.Random(seed)
held = [[] for _ in range(4)]
for round in range(rounds):
    work(chance.random(), 100, held[0])
    check(f"alone/{round}")
for round in range(rounds):
    threads = [threading.Thread(target=work, args=(chance.random(), 100, mine)) for mine in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chance.shuffle(held)  # freed by others than allocated
    check(f"together/{round}")
held.clear()
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
check("end")
say(done=True)
