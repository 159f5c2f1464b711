"""The program of bench/frames.rs: allocations and frees from C, below Python frames. Reads `depth` per line, answers nanoseconds.

frames.py libgpumem.so loop.so folder-of-_frames.py events
"""

import ctypes
import sys

sys.path.insert(0, sys.argv[3])
import _frames

agent, loop = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
events = int(sys.argv[4])
u64 = ctypes.c_uint64
agent.gpumem_module.argtypes = [u64, u64, u64, ctypes.c_char_p]
agent.gpumem_code.argtypes = [u64, ctypes.c_int]
agent.gpumem_pool_create.restype = u64
loop.pairs.argtypes = [ctypes.c_void_p, ctypes.c_void_p, u64, u64]
loop.pairs.restype = u64
functions = [ctypes.cast(function, ctypes.c_void_p) for function in (agent.gpumem_block_alloc, agent.gpumem_block_free)]


class Module:
    def __call__(self, depth):
        return deep(depth)


def deep(depth):
    return deep(depth - 1) if depth > 1 else loop.pairs(*functions, pool, events)


agent.gpumem_code(id(Module.__call__.__code__), _frames.MODULE)
outer, module = Module(), Module()
agent.gpumem_module(id(outer), id(Module), 0, b"GPT")
agent.gpumem_module(id(module), id(Module), id(outer), b"linear")
pool = agent.gpumem_pool_create(b"bench", 0, 0)
print(_frames.prove(agent) or "proved", flush=True)
for line in sys.stdin:
    depth, named = map(int, line.split())
    print(module(depth) if named else deep(depth), flush=True)
