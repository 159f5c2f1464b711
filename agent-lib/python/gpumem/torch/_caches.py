"""Caches of keys and values: which objects hold them, and which functions allocate them. No library is imported for this.

Frames name most caches as they are made (`codes`). Objects tell what frames miss: a cache that is older than the agent's knowledge of its
class, and tensors that a cache took from elsewhere, such as the first keys in older releases of transformers. A tensor that needs a
gradient is no cache: training keeps it for the backward pass, whoever else holds it.
"""

import sys
import time
import weakref
from types import CodeType
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ._modules import classes, instances

#: Methods that allocate what a cache holds; in a training that is kept for the backward pass.
_UPDATES: Tuple[str, ...] = ("__init__", "lazy_initialization", "lazy_initialization_indexer", "update", "update_indexer", "update_conv_state", "update_recurrent_state")
_UPDATES += ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "prefetch", "_quantize")
#: Base classes of objects that hold caches, and those of their methods that allocate them.
_HOLDERS: Tuple[Tuple[str, Tuple[str, ...]], ...] = (
    ("transformers.cache_utils:Cache", _UPDATES),
    ("transformers.cache_utils:CacheLayerMixin", _UPDATES),
    ("transformers.cache_utils:LinearAttentionCacheLayerMixin", _UPDATES),
    ("transformers.generation.continuous_batching.cache:PagedAttentionCache", ("__init__",)),
    ("sglang.srt.mem_cache.memory_pool:KVCache", ("__init__", "_create_buffers")),
)
#: Functions of engines that allocate nothing else.
_FUNCTIONS = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._allocate_kv_cache_tensors",
    "vllm.v1.worker.gpu.attn_utils:_allocate_kv_cache",
    "vllm.worker.cache_engine:CacheEngine._allocate_kv_cache",
)
#: What models return: the cache is a field of it, as an object or as tuples of tensors.
_OUTPUT, _FIELD = "transformers.utils.generic:ModelOutput", "past_key_values"
#: Classes of modules whose buffers are caches: several libraries have one of this name.
MODULES = frozenset(("KVCache",))
#: Of the time, for searches; searches in the beginning, and their share; seconds between two searches, at least.
_SHARE, _EARLY, _EARLY_SHARE, _PAUSE = 0.002, 4, 0.05, 0.5
#: Lists inside of lists.
_DEEPEST = 4
#: Classes whose methods are looked at.
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
    """Code of the functions that allocate caches, as far as their modules are loaded, and whether a training may call them."""
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
    """Objects that hold caches."""

    def __init__(self) -> None:
        #: By address of the object.
        self.known: Dict[int, Any] = {}
        #: When the next search is due, and how many there were.
        self.due = 0.0
        self.searches = 0

    @staticmethod
    def kinds() -> List[type]:
        """Classes of objects that hold caches; none unless a library is loaded that has some."""
        kinds = {id(kind): kind for kind, _ in _holders()}
        output = _at(_OUTPUT)
        if isinstance(output, type):
            kinds.update((id(kind), kind) for kind in classes(output))
        return list(kinds.values())

    def search(self, objects: Optional[List[Any]] = None) -> None:
        """Looks for them among all objects, or among these, which are some. 20 ms for 500,000 objects."""
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
        """Whether there was time enough since the last search."""
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
        """Its attributes, without running any code of its class. Of what a model returns only the cache; none without one."""
        try:
            fields = object.__getattribute__(holder, "__dict__")
        except AttributeError:
            return None
        output = _at(_OUTPUT)
        if isinstance(output, type) and issubclass(type(holder), output):
            return {_FIELD: fields[_FIELD]} if isinstance(fields.get(_FIELD), (list, tuple)) else None
        return dict(fields)

    def tensors(self) -> Iterator[Any]:
        """What they hold now."""
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
