"""Reports live arrays in JAX's preallocated pool by polling.

    import gpumem.jax

    gpumem.jax.look()                        # once
    gpumem.jax.watch(every=1.0)              # in a background thread, every second
    gpumem.jax.name("params", state.params, role="parameter")

Each live array becomes a block of the pool ``jax``, tagged ``jax/`` plus its dtype and shape, or as set by ``name``.
Polling misses arrays that live only between two polls, memory that an executable uses while it runs (see
``compiled.memory_analysis()``), and executables themselves. Memory that JAX reserved and no array covers stays a driver
allocation.
"""

import contextlib
import threading
from typing import Any, Dict, List, Optional, Set, Tuple

from ._library import available
from ._pool import Pool
from ._say import ROLES

#: Bytes and tag path of a buffer, by device and address.
_Seen = Dict[Tuple[int, int], Tuple[int, str]]

_lock = threading.Lock()
#: Platforms whose devices are polled.
_PLATFORMS = ("gpu", "cuda")
_pools: Dict[int, Pool] = {}
_seen: _Seen = {}
_thread: Optional["_Poller"] = None


def buffers(arrays: Any) -> List[Tuple[int, int, int, str]]:
    """Returns device, address, bytes and tag path of every buffer on a GPU; skips deleted and host buffers."""
    found = []
    for array in arrays:
        try:
            if array.is_deleted():
                continue
            for shard in array.addressable_shards:
                device = shard.device
                if device.platform not in _PLATFORMS:
                    continue
                data = shard.data
                number = device.local_hardware_id
                size = int(data.on_device_size_in_bytes())
                path = "jax/{}{}".format(data.dtype, list(data.shape)).replace(" ", "")
                found.append((int(device.id if number is None else number), int(data.unsafe_buffer_pointer()), size, path))
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # deleted meanwhile, donated, or of a kind without buffers
    return found


def look() -> int:
    """Compares live arrays with the last poll and reports the changes. Returns current bytes of arrays on GPUs.

    Returns 0 without an agent.
    """
    import jax

    live: Any = jax.live_arrays
    return _report(buffers(live()), jax.local_devices())


def _report(now: List[Tuple[int, int, int, str]], devices: Any) -> int:
    if not available():
        return 0
    with _lock:
        current: _Seen = {}
        for device, address, size, path in now:
            if address and size:
                current[device, address] = (size, path)  # arrays may share a buffer
        for key in [key for key, what in _seen.items() if current.get(key) != what]:
            device, address = key
            size, _ = _seen.pop(key)
            _pools[device].free_block(address)
            _pools[device].remove_segment(address, size)
        for key, (size, path) in current.items():
            if key not in _seen:
                pool = _pool(key[0])
                pool.add_segment(key[1], size)
                pool.add_block(key[1], size)
                pool.retag(key[1], path)
                _seen[key] = (size, path)
        for device in devices:
            if device.platform in _PLATFORMS:
                _gauge(device)
        return sum(size for size, _ in current.values())


def _pool(device: int) -> Pool:
    if device not in _pools:
        _pools[device] = Pool("jax", device)
    return _pools[device]


def _gauge(device: Any) -> None:
    """Passes the allocator's own totals to the pool; which figures exist depends on the allocator."""
    stats = device.memory_stats() or {}
    used = stats.get("bytes_in_use")
    reserved = stats.get("pool_bytes", stats.get("bytes_reserved"))
    if used is not None and reserved:
        number = device.local_hardware_id
        _pool(int(device.id if number is None else number)).state(int(reserved), int(used))


def name(path: str, tree: Any, role: Optional[str] = None) -> int:
    """Sets the path (``path/key/key``) and role of the arrays in a pytree. Returns the number of buffers set."""
    import jax

    found: Set[Tuple[int, int]] = set()
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    look()
    for keys, leaf in leaves:
        full = "/".join([path, *(_key(key) for key in keys)])
        for device, address, _, _ in buffers([leaf]):
            with _lock:
                if (device, address) in _seen and (device, address) not in found:
                    found.add((device, address))
                    _pool(device).retag(address, full, ROLES.get(role or "", 0))
    return len(found)


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def save_profile(path: str) -> int:
    """Writes JAX's device memory profile (gzipped pprof with stacks, buffers, executables) to a file; returns its bytes."""
    import jax

    profile: bytes = jax.profiler.device_memory_profile()
    with open(path, "wb") as file:
        file.write(profile)
    return len(profile)


class _Poller(threading.Thread):
    def __init__(self, every: float) -> None:
        super().__init__(name="gpumem-jax", daemon=True)
        self.every, self.over = every, threading.Event()

    def run(self) -> None:
        while not self.over.wait(self.every):
            # The program may change arrays during the poll, and JAX may be shutting down: the next poll reads the new
            # state.
            with contextlib.suppress(Exception):
                look()


def watch(every: float = 1.0) -> None:
    """Polls every ``every`` seconds in a background thread, until ``unwatch()``."""
    global _thread
    unwatch()
    _thread = _Poller(every)
    _thread.start()


def unwatch() -> None:
    """Stops the background thread."""
    global _thread
    if _thread is not None:
        _thread.over.set()
        _thread.join()
        _thread = None
