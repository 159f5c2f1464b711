"""Runs after the code from frames.rs: concurrent threads register modules and code, report blocks, and request the proof."""

import threading

assert not sys._is_gil_enabled() and agent.InitializeInjection() == 1
u64 = ctypes.c_uint64
agent.gpumem_pool_create.argtypes = [ctypes.c_char_p, ctypes.c_int, u64]
agent.gpumem_pool_create.restype = u64
agent.gpumem_block_alloc.argtypes = [u64, u64, u64, ctypes.c_uint32]
agent.gpumem_block_free.argtypes = [u64, u64, ctypes.c_int]
agent.gpumem_module.argtypes = [u64, u64, u64, ctypes.c_char_p]
agent.gpumem_code.argtypes = [u64, ctypes.c_int]


class Module:
    def __call__(self, work):
        return work()


agent.gpumem_code(id(Module.__call__.__code__), _frames.MODULE)
pool = agent.gpumem_pool_create(b"pool", 0, 0)
failed = []


def work(thread):
    for n in range(1000):
        module, address = Module(), (thread + 1 << 40) + n * 512
        agent.gpumem_module(id(module), id(Module), 0, b"one")
        module(lambda: agent.gpumem_block_alloc(pool, address, 512, 0))
        if n % 2:
            agent.gpumem_block_free(pool, address, 0)
        reason = _frames.prove(agent)
        if reason != "CPython without a GIL (free-threaded) is not supported":
            failed.append(reason)


threads = [threading.Thread(target=work, args=[n]) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed[:4]
