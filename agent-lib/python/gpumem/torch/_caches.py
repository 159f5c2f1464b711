"""KV caches: the objects that hold them, and the functions that allocate them. Imports no library for this.

Frames name most caches while they are allocated (`codes`). Searching objects finds the rest: caches allocated before the
agent registered their class, and tensors that a cache took over, such as the first keys in older releases of
transformers. A tensor that requires a gradient is not a cache: training keeps it for the backward pass.
"""

import sys
import time
import weakref
from types import CodeType
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ._objects import classes, instances

#: Methods that allocate a cache's tensors. In training these tensors are kept for the backward pass.
_UPDATES: Tuple[str, ...] = ("__init__", "lazy_initialization", "lazy_initialization_indexer", "update", "update_indexer", "update_conv_state", "update_recurrent_state")
_UPDATES += ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "prefetch", "_quantize")
#: Base classes of cache holders, with the methods that allocate.
_HOLDERS: Tuple[Tuple[str, Tuple[str, ...]], ...] = (
    ("transformers.cache_utils:Cache", _UPDATES),
    ("transformers.cache_utils:CacheLayerMixin", _UPDATES),
    ("transformers.cache_utils:LinearAttentionCacheLayerMixin", _UPDATES),
    ("transformers.generation.continuous_batching.cache:PagedAttentionCache", ("__init__",)),
    ("sglang.srt.mem_cache.memory_pool:KVCache", ("__init__", "_create_buffers")),
)
#: Functions of inference engines that allocate only caches.
_FUNCTIONS = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._allocate_kv_cache_tensors",
    "vllm.v1.worker.gpu.attn_utils:_allocate_kv_cache",
    "vllm.worker.cache_engine:CacheEngine._allocate_kv_cache",
)
#: Return type of models: one field holds the cache, as an object or as tuples of tensors.
_OUTPUT, _FIELD = "transformers.utils.generic:ModelOutput", "past_key_values"
#: Module classes whose buffers are caches; several libraries use this name.
MODULES = frozenset(("KVCache",))
#: Share of time for searches; number of early searches and their share; minimum seconds between two searches.
_SHARE, _EARLY, _EARLY_SHARE, _PAUSE = 0.002, 4, 0.05, 0.5
#: Maximum nesting of containers.
_DEEPEST = 4
#: Maximum number of classes whose methods are registered.
_MOST_CLASSES = 60


def _at(path: str) -> Any:
    module, _, names = path.partition(":")
    thing = sys.modules.get(module)
    for name in names.split("."):
        thing = getattr(thing, name, None)
    return thing


def _holders() -> Iterator[Tuple[type, Tuple[str, ...]]]:
    for path, methods in _HOLDERS:
        base = _at(path)
        if isinstance(base, type):
            for kind in classes(base):
                yield kind, methods


def codes() -> List[Tuple[CodeType, bool]]:
    """Returns the code of cache-allocating functions in loaded modules, each with whether training may call it."""
    functions = [(_at(path), False) for path in _FUNCTIONS]
    for kind, methods in list(_holders())[:_MOST_CLASSES]:
        functions += [(vars(kind).get(name), methods is _UPDATES) for name in methods]
    found = []
    for function, is_update in functions:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            found.append((code, is_update))
    return found


class Caches:
    """Live objects that hold caches."""

    def __init__(self) -> None:
        #: Weak references by object address.
        self.known: Dict[int, Any] = {}
        #: Time of the next search; number of searches so far.
        self.due = 0.0
        self.searches = 0

    @staticmethod
    def kinds() -> List[type]:
        """Returns the classes of cache holders; empty until a library with such classes is loaded."""
        kinds = {id(kind): kind for kind, _ in _holders()}
        output = _at(_OUTPUT)
        if isinstance(output, type):
            kinds.update((id(kind), kind) for kind in classes(output))
        return list(kinds.values())

    def search(self, objects: Optional[List[Any]] = None) -> None:
        """Searches all objects, or only the given cache holders. Takes 20 ms for 500,000 objects."""
        kinds = self.kinds() if objects is None else []
        if not kinds and not objects:
            return
        start = time.perf_counter()
        for holder in instances(kinds) if objects is None else objects:
            if id(holder) not in self.known and self._fields(holder) is not None:
                self._add(holder)
        self.searches += 1
        now = time.perf_counter()
        share = _SHARE if self.searches > _EARLY else _EARLY_SHARE
        self.due = now + max((now - start) / share, _PAUSE)

    def is_due(self) -> bool:
        """Returns whether the next search is due."""
        return time.perf_counter() >= self.due

    def _add(self, holder: Any) -> None:
        key = id(holder)
        try:
            self.known[key] = weakref.ref(holder, lambda gone: self._gone(key, gone))
        except TypeError:
            pass

    def _gone(self, key: int, reference: Any) -> None:
        try:
            if self.known.get(key) is reference:
                del self.known[key]
        except Exception:  # the interpreter ends
            pass

    @staticmethod
    def _fields(holder: Any) -> Optional[Dict[str, Any]]:
        """Returns the holder's attributes without running its class's code: of a model output only the cache, ``None``
        without one."""
        try:
            fields = object.__getattribute__(holder, "__dict__")
        except AttributeError:
            return None
        output = _at(_OUTPUT)
        if isinstance(output, type) and issubclass(type(holder), output):
            return {_FIELD: fields[_FIELD]} if isinstance(fields.get(_FIELD), (list, tuple)) else None
        return dict(fields)

    def tensors(self) -> Iterator[Any]:
        """Yields the tensors that the caches hold now."""
        if not self.known:
            return
        tensor = sys.modules["torch"].Tensor
        for reference in list(self.known.values()):
            holder = reference()
            if holder is not None:
                for found in _within(self._fields(holder), tensor, 0):
                    if not found.requires_grad:
                        yield found


def _within(value: Any, tensor: type, depth: int) -> Iterator[Any]:
    if isinstance(value, tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
        for part in list(value.values() if isinstance(value, dict) else value):
            yield from _within(part, tensor, depth + 1)
