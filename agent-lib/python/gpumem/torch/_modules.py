"""Which modules there are, and where in their model: what the agent needs to name the frames of their calls.

A module is known by its address, from when it is found (once, among all objects) or made (PyTorch's hooks for
registration) until it dies. Its path is that of the parent which had it first. Wrappers (DistributedDataParallel,
torch.compile) have no path of their own: a model is called the same with and without them.

Nothing is written into modules, so copies and pickles of them know nothing of this.
"""

import gc
import sys
import time
import weakref
from functools import partial
from heapq import heappop, heappush
from itertools import chain, compress, starmap
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ._agent import functions, text
from ._compiler import is_compiling, unseen

#: Wrappers, and the name under which each has its module. Names with "_" in front are of such wrappers alone.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_INNER = frozenset(name for name in _WRAPPERS.values() if name.startswith("_"))
#: Of the time, for searches.
_SHARE = 0.002
#: Searches in the beginning, their share of the time, and seconds between two.
_EARLY, _EARLY_SHARE, _PAUSE = 4, 0.05, 0.5
#: Modules inside of each other; more are a cycle.
_DEEPEST = 100


class Known(weakref.ref):  # type: ignore[type-arg]
    """A module that the agent knows."""

    __slots__ = ("key", "kind", "parent", "name", "number", "inner", "given")

    key: int
    #: Address of its class.
    kind: int
    #: 0 for a root.
    parent: int
    name: str
    #: Among roots of that name; 0 for others.
    number: int
    #: It wraps this one.
    inner: int
    #: The name was given by the program.
    given: bool


def _module_class() -> Any:
    torch = sys.modules.get("torch")
    return getattr(getattr(torch, "nn", None), "Module", None)


def _classes(module_class: Any) -> List[type]:
    """The class of modules and all that are derived from it, without running any code of theirs."""
    found, seen = [module_class], {id(module_class)}
    for kind in found:
        for derived in type.__subclasses__(kind):
            if id(derived) not in seen:
                seen.add(id(derived))
                found.append(derived)
    return found


def _instances(kinds: List[type]) -> List[Any]:
    """All objects of exactly these classes.

    Among all objects are tuples that somebody is just filling, and growing one that anybody else refers to raises a
    SystemError there. So they are taken, looked through and let go in one call made of functions in C: no other thread runs
    meanwhile.
    """
    wanted = set(map(id, kinds))
    things: List[Any] = []
    taking = map(things.extend, map(gc.get_objects, (None,)))
    found = compress(things, map(wanted.__contains__, map(id, map(type, things))))
    letting_go = starmap(things.clear, ((),))
    return list(chain(taking, found, letting_go))[1:-1]


def children(module: Any) -> Iterator[Tuple[str, Any]]:
    """Its parts, without running any code of its class."""
    parts = object.__getattribute__(module, "__dict__").get("_modules")
    if isinstance(parts, dict):
        for name, child in list(parts.items()):
            if child is not None and isinstance(name, str):
                yield name, child


class Modules:
    """All modules that are known."""

    def __init__(self) -> None:
        self.known: Dict[int, Known] = {}
        #: Modules that the program does not want to be named.
        self.left_out: Dict[int, Any] = {}
        #: Changes: a sweep compares.
        self.version = 0
        #: Of roots, by name: the largest number so far, and those below it that are free, as a heap.
        self._numbers: Dict[str, int] = {}
        self._free: Dict[str, List[int]] = {}
        #: Searches among all objects, seconds that the last one took, and when it ended.
        self.searches = 0
        self.search_seconds = 0.0
        self.searched_at = 0.0

    def __iter__(self) -> Iterator[Tuple[Any, Known]]:
        for known in list(self.known.values()):
            module = known()
            if module is not None:
                yield module, known

    # What the agent is told.

    def _say(self, known: Known) -> None:
        name = known.name if known.number < 2 else "%s#%d" % (known.name, known.number)
        functions.module(known.key, known.kind, known.parent, text(name))
        self.version += 1

    def _gone(self, known: Known) -> None:
        """Called when a module dies, possibly while the interpreter ends."""
        try:
            if self.known.get(known.key) is known:
                del self.known[known.key]
                self._let_go(known)
                functions.module_gone(known.key)
                self.version += 1
        except Exception:  # names of this module may be gone by now
            pass

    # Names of roots.

    def _let_go(self, known: Known) -> None:
        if known.number:
            heappush(self._free[known.name], known.number)
            known.number = 0

    def _take(self, known: Known, name: str) -> None:
        self._let_go(known)
        free = self._free.setdefault(name, [])
        if free:
            number = heappop(free)
        else:
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
        known.name, known.number, known.parent = name, number, 0

    # Places.

    def _make(self, module: Any) -> Optional[Known]:
        left_out = self.left_out.get(id(module))
        if left_out is not None and left_out() is module:
            return None
        try:
            known = Known(module, self._gone)
        except TypeError:  # cannot be referred to weakly: its death would not be seen
            return None
        known.key, known.kind = id(module), id(type(module))
        known.parent, known.name, known.number, known.inner, known.given = 0, "", 0, 0, False
        self.known[known.key] = known
        return known

    def root(self, module: Any, name: Optional[str] = None) -> Optional[Known]:
        """A module without a parent, as far as is known."""
        known = self.known.get(id(module)) or self._make(module)
        if known is None:
            return None
        known.given = name is not None
        self._take(known, name or type(module).__name__)
        self._say(known)
        inner = self.known.get(known.inner)
        if inner is not None and name is not None:
            self._let_go(inner)
            inner.name, inner.number, inner.parent = known.name, 0, 0
            self._say(inner)
        return known

    def adopt(self, parent: Any, name: str, child: Any) -> None:
        """``child`` is now the part ``name`` of ``parent``."""
        above = self.known.get(id(parent)) or self.root(parent)
        if above is None:
            return
        known = self.known.get(id(child))
        if known is None:
            known = self._make(child)
            if known is None:
                return
        elif known.parent == above.key or known.given or self._is_inside(above, known):
            return
        elif known.parent and self._holds(known):
            return
        if _WRAPPERS.get(type(parent).__name__) == name or name in _INNER:
            self._wrap(above, known, child)
        else:
            self._put(known, above.key, name)

    def _wrap(self, wrapper: Known, known: Known, child: Any) -> None:
        """What a wrapper wraps stands where the wrapper stands."""
        wrapper.inner = known.key
        if wrapper.parent:
            self._put(known, wrapper.parent, wrapper.name)
            return
        if not wrapper.given:
            if not known.number:
                self._take(known, type(child).__name__)
            self._let_go(wrapper)
            # Of a later one the number is part of the name.
            wrapper.name = known.name if known.number < 2 else "%s#%d" % (known.name, known.number)
            self._say(wrapper)
            self._say(known)
        else:
            self._put(known, 0, wrapper.name)

    def _put(self, known: Known, parent: int, name: str) -> None:
        self._let_go(known)
        known.parent, known.name = parent, name
        self._say(known)
        inner = self.known.get(known.inner)
        if inner is not None:
            self._put(inner, parent, name)

    def _is_inside(self, known: Known, outer: Known) -> bool:
        for _ in range(_DEEPEST):
            if known is outer:
                return True
            above = self.known.get(known.parent)
            if above is None:
                return False
            known = above
        return True

    def _holds(self, known: Known) -> bool:
        """Whether the parent that is known still has it."""
        above = self.known.get(known.parent)
        parent, module = (above() if above is not None else None), known()
        if parent is None:
            return False
        return any(child is module for _, child in children(parent))

    def learn(self, module: Any) -> None:
        """A module and everything inside of it."""
        if id(module) not in self.known:
            self.root(module)
        for parent in self._within(module):
            for name, child in children(parent):
                self.adopt(parent, name, child)

    def forget(self, module: Any) -> None:
        """A module and everything inside of it has no name any more, and gets none."""
        for part in self._within(module):
            key = id(part)
            self.left_out[key] = weakref.ref(part, partial(self._let_in, key))
            known = self.known.get(key)
            if known is not None:
                self._gone(known)

    def _let_in(self, key: int, _: Any) -> None:
        self.left_out.pop(key, None)

    def want(self, module: Any) -> None:
        """The program wants it to be named after all."""
        for part in self._within(module):
            self.left_out.pop(id(part), None)

    @staticmethod
    def _within(module: Any) -> List[Any]:
        found, seen = [module], {id(module)}
        for parent in found:
            for _, child in children(parent):
                if id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
        return found

    def path(self, known: Known) -> str:
        """As the agent writes it: a number belongs to what it counts, as in ``GPT/h.3/attn``."""
        path, below = "", ""
        at: Optional[Known] = known
        for _ in range(_DEEPEST):
            if at is None:
                break
            name = at.name if at.number < 2 else "%s#%d" % (at.name, at.number)
            path = name + ("." if below.isdigit() else "/") + path if path else name
            below = name
            at = self.known.get(at.parent)
        return path

    # Finding them.

    def is_due(self) -> bool:
        """Whether there was time enough since the last search; the first ones need not wait that long."""
        pause = self.search_seconds / (_SHARE if self.searches > _EARLY else _EARLY_SHARE)
        return time.perf_counter() >= self.searched_at + max(pause, _PAUSE)

    def search(self) -> int:
        """Looks for modules among all objects; how many are new."""
        module_class = _module_class()
        if module_class is None:
            return 0
        start = time.perf_counter()
        found = [module for module in _instances(_classes(module_class)) if self._is_whole(module)]
        new = [module for module in found if id(module) not in self.known]
        parts = {id(child) for module in found for _, child in children(module)}
        roots = [module for module in new if id(module) not in parts]
        for module in roots:
            self.learn(module)
        for module in new:  # parts of those that were known before, and cycles
            if id(module) not in self.known or self.known[id(module)].number:
                self.learn(module)
        for module in found:
            if id(module) in self.known:
                for name, child in children(module):
                    self.adopt(module, name, child)
        self.searches += 1
        self.searched_at = time.perf_counter()
        self.search_seconds = self.searched_at - start
        return len(new)

    @staticmethod
    def _is_whole(module: Any) -> bool:
        """Its constructor has run, or it was copied."""
        return "_modules" in object.__getattribute__(module, "__dict__")

    def look_again(self) -> None:
        """Classes of modules change under way (FSDP2 does that): the agent compares them."""
        for module, known in self:
            if id(type(module)) != known.kind:
                known.kind = id(type(module))
                self._say(known)

    def on_module(self, parent: Any, name: str, child: Any) -> None:
        """A module gets a part."""
        if child is None or not isinstance(name, str):
            return
        self.adopt(parent, name, child)
        if any(id(part) not in self.known for _, part in children(child)):
            self.learn(child)

    def on_parameter(self, module: Any, name: str, parameter: Any) -> None:
        """A module gets a parameter: some have no parts and belong to nothing."""
        if id(module) not in self.known:
            self.root(module)
        self.version += 1


def hooks(modules: Modules) -> Tuple[Any, Any]:
    """Two functions as PyTorch calls them. Each returns None: what is registered stays as it is."""
    is_traced = is_compiling()

    def on_module(parent: Any, name: str, child: Any) -> None:
        if is_traced():
            return
        try:
            unseen(modules.on_module, parent, name, child)
        except Exception:
            pass

    def on_parameter(module: Any, name: str, parameter: Any) -> None:
        if is_traced():
            return
        try:
            unseen(modules.on_parameter, module, name, parameter)
        except Exception:
            pass

    return on_module, on_parameter
