"""Which modules there are, and where in their model: what the agent needs to name the frames of their calls.

A module is known by its address, from when it is found (once, among all objects) or made (PyTorch's hooks for
registration) until it dies. Its path is the first one that `named_modules()` of the oldest root gives it. Wrappers
(DistributedDataParallel, torch.compile) have no path of their own: a model is called the same with and without them. Modules that a
compiler makes (torch.fx.GraphModule) have one only where nobody who has one calls them.

Hooks name a new module at once. No hook shows `del`, `insert` and `pop` of containers, and a hook comes before the change that it
announces. Therefore `follow` compares a fingerprint of all modules' parts at each step of an optimizer, as far as `_SHARE` of the time pays
for it, and `arrange` names everything anew from the roots once the fingerprint differs.

Nothing is written into modules, so copies and pickles of them know nothing of this.
"""

import gc
import sys
import time
import weakref
from functools import partial
from heapq import heappop, heappush
from itertools import chain, compress, repeat, starmap
from operator import itemgetter
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ._agent import functions, text
from ._places import Parts, Place, Places

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
#: Of the time, for searches; and likewise for comparing and arranging modules.
_SHARE = 0.002
#: Seconds in the process's life for which modules are arranged as soon as a hook has shown a change.
_AT_ONCE = 2.0
#: Seconds between two comparisons, at least.
_APART = 0.002
#: Searches in the beginning, their share of the time, and seconds between two.
_EARLY, _EARLY_SHARE, _PAUSE = 4, 0.05, 0.5
#: A number that no record has.
_NEVER = 1 << 62
#: Former paths that are kept of a module.
_PAST = 8
#: Modules inside of each other; more are a cycle.
_DEEPEST = 100


class Known(weakref.ref):  # type: ignore[type-arg]
    """A module that the agent knows."""

    __slots__ = ("key", "kind", "order", "parent", "above", "name", "number", "inner", "given", "made", "generated", "is_parent", "since", "past", "is_displaced", "was_trained")

    key: int
    #: Address of its class.
    kind: int
    #: Modules that were known before it.
    order: int
    #: 0 for a root.
    parent: int
    #: What is known of the parent, which may be gone.
    above: "Optional[Known]"
    name: str
    #: Among roots of that name; 0 for others.
    number: int
    #: It wraps this one.
    inner: int
    #: The name was given by the program.
    given: bool
    #: A compiler made it.
    made: bool
    #: That, and it is no part of a module that somebody wrote.
    generated: bool
    #: Others were placed below it.
    is_parent: bool
    #: Number of the first record that may have its present path because of it.
    since: int
    #: Paths that memory may still have because of it, each with the numbers of the first record and the one behind the last.
    past: List[Tuple[str, int, int]]
    #: Another module is in its place by now: what has the present path is that one's, if both may be meant.
    is_displaced: bool
    #: A parameter of its own was stepped by an optimizer, or had a gradient.
    was_trained: bool

    def text(self) -> str:
        """The name with its number."""
        return self.name if self.number < 2 else "%s#%d" % (self.name, self.number)

    def place(self) -> Tuple[int, str, bool]:
        """What its path follows from."""
        return self.parent, self.text(), self.generated


def _module_class() -> Any:
    torch = sys.modules.get("torch")
    return getattr(getattr(torch, "nn", None), "Module", None)


def classes(base: Any) -> List[type]:
    """A class and all that are derived from it, without running any code of theirs."""
    found, seen = [base], {id(base)}
    for kind in found:
        for derived in type.__subclasses__(kind):
            if id(derived) not in seen:
                seen.add(id(derived))
                found.append(derived)
    return found


def instances(kinds: List[type]) -> List[Any]:
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


def next_record() -> int:
    """Number of the record that the agent makes next."""
    return int(functions.rename(b"", 0))


_refer = weakref.ref.__call__
_parts = itemgetter("_modules")


def _is_generated(module: Any) -> bool:
    """Whether a compiler or a tracer made it: a GraphModule has a class of its own, derived from that one."""
    kinds = type(module).__mro__
    return any(kind.__name__ == "GraphModule" and kind.__module__ == "torch.fx.graph_module" for kind in kinds)


def _root_name(module: Any) -> str:
    """What a model is called that the program has given no name. DataParallel makes copies for each pass."""
    name = type(module).__name__
    return name + " replica" if object.__getattribute__(module, "__dict__").get("_is_replica") is True else name


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
        #: When modules are to be compared again, and what they were like the last time.
        self.due = 0.0
        self._print = 0
        #: A hook has shown a change that may have moved modules.
        self._stale = False
        self._left = _AT_ONCE
        self._order = 0
        #: In the order of their places.
        self._arranged: List[Known] = []

    def __iter__(self) -> Iterator[Tuple[Any, Known]]:
        """In the order of their places, then those that have none so far: of tied parameters the first one names them."""
        seen = set()
        for known in chain(self._arranged, list(self.known.values())):
            module = known() if known.key not in seen and self.known.get(known.key) is known else None
            if module is not None:
                seen.add(known.key)
                yield module, known

    # What the agent is told.

    def _say(self, known: Known) -> None:
        functions.module(known.key, known.kind, known.key if known.generated else known.parent, text(known.text()))
        self.version += 1

    def _gone(self, known: Known) -> None:
        """Called when a module dies, possibly while the interpreter ends."""
        try:
            if self.known.get(known.key) is known:
                del self.known[known.key]
                name = known.text()
                self._let_go(known)
                known.name = name
                functions.module_gone(known.key)
                self.version += 1
                if known.parent or known.is_parent:
                    self._moved()
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
        known.name, known.number, known.parent, known.above = name, number, 0, None

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
        known.parent, known.above, known.name, known.number, known.inner, known.given = 0, None, "", 0, 0, False
        known.made = known.generated = _is_generated(module)
        known.is_parent, known.since, known.past, known.is_displaced, known.was_trained = False, next_record(), [], False, False
        self._order += 1
        known.order = self._order
        self.known[known.key] = known
        return known

    def root(self, module: Any, name: Optional[str] = None) -> Optional[Known]:
        """A module without a parent, as far as is known."""
        known = self.known.get(id(module)) or self._make(module)
        if known is None:
            return None
        known.given = name is not None
        known.generated = known.generated and name is None
        self._take(known, name or _root_name(module))
        self._say(known)
        inner = self.known.get(known.inner)
        if inner is not None and name is not None:
            self._let_go(inner)
            inner.name, inner.number, inner.parent, inner.above = known.name, 0, 0, None
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
        elif known.given or above.generated or self._is_inside(above, known):
            return
        elif (known.parent, known.name) == (above.key, name):
            return
        elif known.parent and self._holds(known):
            self._moved()
            return  # shared, or the other parent is about to lose it: `arrange` tells
        else:
            self._leave(child)
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
            wrapper.name = known.text()
            self._say(wrapper)
            self._say(known)
        else:
            self._put(known, 0, wrapper.name)

    def _put(self, known: Known, parent: int, name: str) -> None:
        self._let_go(known)
        above = self.known.get(parent)
        known.generated = known.generated and above is not None and above.generated
        known.parent, known.above, known.name = parent, above, name
        if above is not None:
            above.is_parent = True
        self._say(known)
        inner = self.known.get(known.inner)
        if inner is not None:
            self._put(inner, parent, name)

    def _is_inside(self, known: Known, outer: Known) -> bool:
        for _ in range(_DEEPEST):
            if known is outer:
                return True
            if known.above is None:
                return False
            known = known.above
        return True

    def _holds(self, known: Known) -> bool:
        """Whether the parent that is known still has it under its name."""
        above = known.above
        parent, module = (above() if above is not None else None), known()
        if parent is None or above is None or above.generated:
            return False
        return any(child is module and name == known.name for name, child in children(parent))

    # Following changes.

    def _moved(self) -> None:
        """Modules may be elsewhere: they are arranged soon, unless that was the case too often."""
        self._stale = True
        if self._left > 0:
            self.due = 0.0

    def _leave(self, module: Any) -> None:
        """This module and its parts get other paths with what comes next. What memory has their present ones is known until `arrange`."""
        self._moved()
        now = next_record()
        for part in self._within(module):
            known = self.known.get(id(part))
            if known is None:
                continue
            if known.since < now and not known.is_displaced:
                known.past = known.past[1 - _PAST :] + [(self.path(known), known.since, now)]
            known.since, known.is_displaced = now, False

    def _displaced(self, parent: Any, name: str, old: Any, new: Any) -> None:
        """``new`` takes the place of ``old``, which may be inside of it, as a wrapped layer is, or around it, or elsewhere in ``parent``."""
        known, above = self.known.get(id(old)), self.known.get(id(parent))
        if known is None or above is None or (known.parent, known.name) != (above.key, name):
            return
        self._leave(old)
        inner = self.known.get(id(new))
        if inner is not None and not inner.given and self._is_inside(inner, known):
            inner.parent, inner.above = 0, None
            self.adopt(parent, name, new)
        known.parent, known.above = 0, None
        if self._goes_on(old, [parent] + self._within(new), (parent, name)):
            return
        if self._left > 0:
            start = time.thread_time()
            has_place = self._goes_on(old, [module for module, _ in self], (parent, name))
            self._left -= time.thread_time() - start
            if has_place:
                return
        known.parent, known.above = above.key, above
        for part in self._within(old):
            nowhere = self.known.get(id(part))
            if nowhere is not None and self._is_inside(nowhere, known):
                nowhere.is_displaced = True

    def _goes_on(self, old: Any, holders: List[Any], but: Tuple[Any, str]) -> bool:
        """Whether one of these has a module as well that loses its place; then that is its place."""
        for holder in holders:
            for own, child in children(holder):
                if child is old and not (holder is but[0] and own == but[1]):
                    self.adopt(holder, own, old)
                    known = self.known.get(id(old))
                    if known is not None and (known.above is not None or known.number):
                        return True
        return False

    def _fingerprint(self) -> int:
        """Differs when a module has other parts, or the same ones under other names. Made of functions in C: no code of the modules' classes
        runs, and 1,000 modules cost 100 to 300 us.
        """
        try:
            modules = list(map(_refer, list(self.known.values())))
            found = map(_parts, map(object.__getattribute__, modules, repeat("__dict__")))
            parts = list(filter(dict.__len__, found))
            values = tuple(map(id, chain.from_iterable(map(dict.values, parts))))
            return hash((values, tuple(chain.from_iterable(parts)), tuple(map(dict.__len__, parts)), tuple(map(id, parts))))
        except Exception:  # one has just died, or has no parts at all
            return hash(tuple((known.key, name, id(child)) for module, known in self for name, child in children(module)))

    def follow(self, at_once: bool = False) -> bool:
        """Arranges the modules if they have changed and it is time; whether any has another path since."""
        if not at_once and time.perf_counter() < self.due:
            return False
        start = time.thread_time()
        has_changed = self._stale or self._fingerprint() != self._print
        has_moved = has_changed and self.arrange()
        seconds = time.thread_time() - start
        if has_changed:
            self._left -= seconds
        self.due = time.perf_counter() + _APART
        self.pay(seconds)
        return has_moved

    def pay(self, seconds: float) -> None:
        """So much time was spent on comparing."""
        self.due += seconds / _SHARE

    def arrange(self) -> bool:
        """Names all modules after where they are now; whether any has another path than before. Live memory that has an old path is
        renamed. Some 3 ms for 1,000 modules.
        """
        self._stale = False
        live = list(self)  # they live meanwhile
        present = [(known, self.path(known)) for _, known in live]
        parts = self._edges(live)
        self._print = self._fingerprint()
        ones = [known for _, known in live]
        before = [known.place() for known in ones]
        places = Places(ones, parts)
        alike = places.alike
        for known, parent, name in places.order:
            if parent or known.key in alike:
                self._let_go(known)
                known.parent, known.above, known.name = parent, self.known.get(parent), name
        for known, parent, _ in places.order:
            if not parent and known.key not in alike and not known.number:
                self._take(known, _root_name(known()))
        for key, leader in alike.items():
            self.known[key].name = places.known[leader].text()
        self._rename(places.order, present)
        self._arranged = [known for known, _, _ in places.order]
        moved = [known for known, place in zip(ones, before) if known.place() != place]
        for known in moved:
            self._say(known)
        if moved:
            functions.modules_settle()
        return bool(moved)

    def _edges(self, live: List[Tuple[Any, Known]]) -> Parts:
        """The parts of each module. Those that nobody knew are known then."""
        found: Parts = {}
        for module, known in live:  # which grows
            wrapped = _WRAPPERS.get(type(module).__name__)
            own: List[Tuple[str, Known, bool]] = []
            known.inner = 0
            for name, child in children(module):
                below = self.known.get(id(child))
                if below is None:
                    below = self._make(child)
                    if below is None:
                        continue
                    live.append((child, below))
                is_inner = name == wrapped or name in _INNER
                if is_inner:
                    known.inner = below.key
                own.append((name, below, is_inner))
            known.is_parent = bool(own)
            found[known.key] = own
        return found

    def _rename(self, order: List[Place], present: List[Tuple[Known, str]]) -> None:
        """Tells the agent which paths are others now: all of them, so that it knows what lies below an old path and has not moved."""
        paths = {0: ""}
        for known, parent, _ in order:
            above, name = paths[parent], known.text()
            paths[known.key] = above + ("." if name.isdigit() else "/") + name if above else name
        # A wrapper has the path of what it wraps: that comes first.
        present.sort(key=lambda pair: (pair[0].is_displaced, pair[0].inner != 0))
        rows = [(old, paths[known.key], since, until) for known, _ in present for old, since, until in known.past]
        rows += [(old, paths[known.key], known.since, _NEVER) for known, old in present if old]
        if any(old != new for old, new, _, _ in rows):
            words = b"".join(b"%s\0%s\0%d\0%d\0" % (text(old), text(new), since, until) for old, new, since, until in rows)
            functions.rename(words, len(words))
        for known, _, _ in order:
            known.since, known.past, known.is_displaced = 0, [], False

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
            name = at.text()
            path = name + ("." if below.isdigit() else "/") + path if path else name
            below = name
            at = at.above
        return path

    # Finding them.

    def is_due(self) -> bool:
        """Whether there was time enough since the last search; the first ones need not wait that long."""
        pause = self.search_seconds / (_SHARE if self.searches > _EARLY else _EARLY_SHARE)
        return time.perf_counter() >= self.searched_at + max(pause, _PAUSE)

    @staticmethod
    def kinds() -> List[type]:
        """Classes of modules."""
        module_class = _module_class()
        return classes(module_class) if module_class is not None else []

    def search(self, objects: Optional[List[Any]] = None) -> int:
        """Looks for modules among all objects, or among these, which are modules; how many are new."""
        start = time.perf_counter()
        objects = instances(self.kinds()) if objects is None else objects
        found = [module for module in objects if self._is_whole(module)]
        before = self._order
        for module in found:
            if id(module) not in self.known:
                self._make(module)
        self.arrange()
        self.searches += 1
        self.searched_at = time.perf_counter()
        self.search_seconds = self.searched_at - start
        return self._order - before

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

    # PyTorch's hooks. Each returns None: what is registered stays as it is.

    def on_module(self, parent: Any, name: str, child: Any) -> None:
        """A module gets a part."""
        try:
            if child is None or not isinstance(name, str):
                return
            self.adopt(parent, name, child)
            parts = object.__getattribute__(parent, "__dict__").get("_modules")
            old = parts.get(name) if isinstance(parts, dict) else None
            if old is not None and old is not child:
                self._displaced(parent, name, old, child)
            if any(id(part) not in self.known for _, part in children(child)):
                self.learn(child)
        except Exception:
            pass

    def on_parameter(self, module: Any, name: str, parameter: Any) -> None:
        """A module gets a parameter: some have no parts and belong to nothing."""
        try:
            if id(module) not in self.known:
                self.root(module)
            self.version += 1
        except Exception:
            pass
