"""Searches of objects, classes and child modules, which run no code of the program."""

import gc
from collections import deque
from itertools import chain, compress, starmap
from typing import Any, Callable, Iterator, List, Set, Tuple


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
