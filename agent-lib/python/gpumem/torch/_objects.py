"""Searches of objects, classes and child modules, and reads of them, which run no code of the program."""

import gc
import time
from collections import deque
from itertools import chain, compress, starmap
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

#: Seconds after which a scan begins no further pass over all objects, and counts no further: of CPU time, and of any time if
#: others use the processors. A pass takes 0.1 to 0.3 s for a million objects.
CPU_SECONDS, SECONDS = 1.0, 5.0
#: Kinds of objects, and of classes derived from them, that only lead to others.
GROUPS = (list, tuple, dict, set, frozenset, deque, BaseException)
#: Modules whose classes lead to others, although some releases define them like classes of a program.
_BUILTIN = ("builtins", "collections", "functools", "itertools")
#: Bit of the flags of a class that was made at run time.
_HEAP_TYPE = 1 << 9


def classes(base: Any) -> List[type]:
    """Returns a class and all classes derived from it, without running their code."""
    found, seen = [base], {id(base)}
    for kind in found:
        for derived in type.__subclasses__(kind):
            if id(derived) not in seen:
                seen.add(id(derived))
                found.append(derived)
    return found


def _search(search: Callable[[List[Any]], Iterator[Any]]) -> List[Any]:
    """Returns what a search of C functions finds in the list of all objects that the garbage collector tracks.

    The list contains tuples under construction. A tuple with a second reference raises SystemError when its constructor
    resizes it. So the list is built, searched and cleared in one call of C functions, during which no other thread runs.
    """
    things: List[Any] = []
    taking = map(things.extend, map(gc.get_objects, (None,)))
    letting_go = starmap(things.clear, ((),))
    return list(chain(taking, search(things), letting_go))[1:-1]


def _others(things: List[Any]) -> Iterator[Any]:
    """Yields all objects of the list except the list itself, which it contains: it refers to every object."""
    return compress(things, map(id(things).__ne__, map(id, things)))


def instances(kinds: List[type]) -> List[Any]:
    """Returns all objects of exactly these classes."""
    wanted = set(map(id, kinds))
    return _search(lambda things: compress(things, map(wanted.__contains__, map(id, map(type, things)))))


def count_objects() -> int:
    """Returns how many objects the garbage collector tracks. The list of them ends in the same call; see `_search`."""
    return sum(map(len, map(gc.get_objects, (None,))))


def count_references() -> int:
    """Returns how many references lists, tuples, dicts and sets have to other objects, each key with its value."""
    wanted = set(map(id, (list, tuple, dict, set, frozenset, deque)))

    def count(things: List[Any]) -> Iterator[int]:
        groups = compress(_others(things), map(wanted.__contains__, map(id, map(type, _others(things)))))
        return map(sum, (map(len, groups),))

    return int(_search(count)[0])


def referenced(addresses: Set[int]) -> Set[int]:
    """Returns which of these addresses are those of objects to which a tracked object refers."""
    # With address 0, which no object has, the search never ends early; iterators that are not at their end would keep objects.
    wanted = addresses | {0}

    def search(things: List[Any]) -> Iterator[Set[int]]:
        return map(wanted.intersection, (map(id, chain.from_iterable(map(gc.get_referents, _others(things)))),))

    return set(_search(search)[0])


def children(module: Any) -> Iterator[Tuple[str, Any]]:
    """Yields names and child modules, without running the class's code."""
    parts = object.__getattribute__(module, "__dict__").get("_modules")
    if isinstance(parts, dict):
        for name, child in list(parts.items()):
            if child is not None and isinstance(name, str):
                yield name, child


def class_text(kind: type, attribute: str) -> str:
    try:
        found = type.__dict__[attribute].__get__(kind)
    except AttributeError:  # some classes of extensions, and those made without globals, have no module
        return ""
    return found if type(found) is str else ""


def members(kind: type) -> List[Dict[str, Any]]:
    """Returns the variables of a class and of its bases, without running code of a metaclass."""
    return [type.__dict__["__dict__"].__get__(base) for base in type.__dict__["__mro__"].__get__(kind)]


def attributes(thing: Any) -> Any:
    """Returns the `__dict__` of an instance, without running code of its class; `None` without one."""
    getter = next((members["__dict__"] for members in members(type(thing)) if "__dict__" in members), None)
    return getter.__get__(thing) if type(getter) is GetSetDescriptorType else None


def key(variables: Any, value: Any) -> str:
    """Returns the name of a value in a dict of variables, or in those of a class."""
    kind = type(variables)
    if not issubclass(kind, dict) and kind is not MappingProxyType:
        return ""
    items = dict.items(variables) if issubclass(kind, dict) else variables.items()
    names = [name for name, other in list(items) if other is value]
    return names[0] if names and type(names[0]) is str else ""


def slot(thing: Any, value: Any) -> str:
    """Returns the name of the slot of an instance that holds a value."""
    for variables in members(type(thing)):
        for name, member in variables.items():
            if type(member) is MemberDescriptorType and not name.startswith("__"):
                try:
                    if member.__get__(thing) is value:
                        return str(name)
                except AttributeError:  # an empty slot
                    pass
    return ""


def only_leads(kind: type) -> bool:
    """Returns whether objects of this kind have no name of their own: they are built into the interpreter, or group others."""
    is_builtin = not type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE or class_text(kind, "__module__") in _BUILTIN
    return is_builtin or issubclass(kind, GROUPS)


def is_lru_cache(kind: type) -> bool:
    return class_text(kind, "__module__") == "functools" and class_text(kind, "__name__") == "_lru_cache_wrapper"


class Deadline:
    """The end of a scan's time: CPU time of this thread, and the longest time that the program waits."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, seconds: float = SECONDS) -> None:
        self.cpu_end = time.thread_time() + cpu_seconds
        self.end = time.monotonic() + seconds

    def is_over(self) -> bool:
        return time.thread_time() > self.cpu_end or time.monotonic() > self.end
