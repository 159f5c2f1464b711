"""Searches of objects, classes and child modules, which run no code of the program."""

import gc
from collections import deque
from itertools import chain, compress, starmap
from typing import Any, Iterator, List, Set, Tuple


def classes(base: Any) -> List[type]:
    """Returns a class and all classes derived from it, without running their code."""
    found, seen = [base], {id(base)}
    for kind in found:
        for derived in type.__subclasses__(kind):
            if id(derived) not in seen:
                seen.add(id(derived))
                found.append(derived)
    return found


def instances(kinds: List[type]) -> List[Any]:
    """Returns all objects of exactly these classes.

    The list of all objects contains tuples under construction. A tuple with a second reference raises SystemError when its
    constructor resizes it. So the list is built, filtered and cleared in one call of C functions, during which no other
    thread runs.
    """
    wanted = set(map(id, kinds))
    things: List[Any] = []
    taking = map(things.extend, map(gc.get_objects, (None,)))
    found = compress(things, map(wanted.__contains__, map(id, map(type, things))))
    letting_go = starmap(things.clear, ((),))
    return list(chain(taking, found, letting_go))[1:-1]


def count_objects() -> int:
    """Returns how many objects the garbage collector tracks. The list of them ends in the same call; see `instances`."""
    return sum(map(len, map(gc.get_objects, (None,))))


def count_references() -> int:
    """Returns how many references lists, tuples, dicts and sets have to other objects, each key with its value; see `instances`."""
    wanted = set(map(id, (list, tuple, dict, set, frozenset, deque)))
    things: List[Any] = []
    taking = map(things.extend, map(gc.get_objects, (None,)))
    counted = map(sum, (map(len, compress(things, map(wanted.__contains__, map(id, map(type, things))))),))
    letting_go = starmap(things.clear, ((),))
    steps: List[Any] = list(chain(taking, counted, letting_go))
    return int(steps[1])


def referenced(addresses: Set[int]) -> Set[int]:
    """Returns which of these addresses are those of objects to which a tracked object refers; see `instances`."""
    things: List[Any] = []
    taking = map(things.extend, map(gc.get_objects, (None,)))
    # With address 0, which no object has, the search never ends early; iterators that are not at their end would keep objects.
    found = map((addresses | {0}).intersection, (map(id, chain.from_iterable(map(gc.get_referents, things))),))
    letting_go = starmap(things.clear, ((),))
    steps: List[Any] = list(chain(taking, found, letting_go))
    return set(steps[1])


def children(module: Any) -> Iterator[Tuple[str, Any]]:
    """Yields names and child modules, without running the class's code."""
    parts = object.__getattribute__(module, "__dict__").get("_modules")
    if isinstance(parts, dict):
        for name, child in list(parts.items()):
            if child is not None and isinstance(name, str):
                yield name, child
