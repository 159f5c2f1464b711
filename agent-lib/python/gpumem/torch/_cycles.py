"""Finds tensors that only reference cycles keep: objects that the garbage collector would free, and has not freed yet.

Applies the rule of the collector to a part of all objects. An object whose references all come from that part may be garbage; one
with any other reference is not, nor is anything that it refers to. So a part that is too small hides garbage, and never makes
it up.
"""

import gc
import sys
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Container, Dict, List, Set, Tuple

from ._objects import Deadline, class_text, instances, only_leads
from ._variables import Name, function_of, place_of

#: Maximum number of objects of the part, and of their references. So many take about 0.2 s.
_MOST, _MOST_REFERENCES = 100_000, 500_000
#: Number of objects between two looks at the clock.
_CHECKED = 256
#: Maximum number of references from the object after which a cycle is named to a tensor.
_DEEPEST = 10
#: Kinds of objects that cycles contain, and do not begin a search: there are too many of them.
_COMMON = (list, tuple, dict, set, frozenset, FunctionType, MethodType, BuiltinFunctionType)
#: Kinds of objects to which cycles refer, and which lead to everything else.
_SHARED = (type, ModuleType, CodeType)


def find(
    kinds: Set[type], tensors: Container[int], known: Dict[int, int], excluded: Container[int], deadline: Deadline
) -> Dict[Name, Set[int]]:
    """Returns the addresses of the tensors that cycles keep, by the object in the cycle that holds them.

    `kinds` are the kinds of objects on the ways to tensors. `known` are the numbers of references that the caller has to
    objects. `excluded` objects are no part of a cycle: running frames, and variables of modules.
    """
    part = instances(_beginnings(kinds))
    reached = _extend(part, tensors, excluded, deadline)
    places = {id(thing): place for place, thing in enumerate(part)}
    walked = [place for place in range(reached) if id(part[place]) not in tensors]
    above, left = _unexplained(part, places, walked, known)
    _spare_referenced(part, places, walked, left)
    found: Dict[Name, Set[int]] = {}
    for address, place in places.items():
        if address in tensors and not left[place]:
            found.setdefault(_name(part, above, place), set()).add(address)
    return found


def _beginnings(kinds: Set[type]) -> List[type]:
    return [kind for kind in kinds if kind not in _COMMON and not issubclass(kind, _SHARED)]


def _extend(part: List[Any], tensors: Container[int], excluded: Container[int], deadline: Deadline) -> int:
    """Extends a list of objects by those to which they refer, the nearest first. Returns for how many it has done so."""
    part[:] = [thing for thing in part[:_MOST] if id(thing) not in excluded]
    # The list itself may be the contents of a cell.
    seen, references = {id(part), *map(id, part)}, 0
    for place, thing in enumerate(part):  # the list grows meanwhile
        if place % _CHECKED == 0 and deadline.is_over():
            return place
        if id(thing) in tensors:
            continue
        below = gc.get_referents(thing)
        references += len(below)
        if references > _MOST_REFERENCES:
            return place
        for one in below:
            if len(part) >= _MOST:
                return place
            if gc.is_tracked(one) and not issubclass(type(one), _SHARED) and id(one) not in seen:
                if id(one) not in excluded:
                    seen.add(id(one))
                    part.append(one)
    return len(part)


def _unexplained(
    part: List[Any], places: Dict[int, int], walked: List[int], known: Dict[int, int]
) -> Tuple[List[int], List[bool]]:
    """Returns for each object the place of one that refers to it, or -1, and whether it has a reference from elsewhere."""
    above, explained = [-1] * len(part), [known.get(id(thing), 0) for thing in part]
    for place in walked:
        for below in map(places.get, map(id, gc.get_referents(part[place]))):
            if below is not None:
                explained[below] += 1
                above[below] = place if above[below] < 0 and below != place else above[below]
    # The list and the call refer to each object, as they do to this one.
    own = next(map(sys.getrefcount, [object()]))
    counts = map(sys.getrefcount, part)
    return above, [count - own != number for count, number in zip(counts, explained)]


def _spare_referenced(part: List[Any], places: Dict[int, int], walked: List[int], left: List[bool]) -> None:
    """Marks all objects to which marked ones refer. References of an object that was not walked are unexplained already."""
    waiting = [place for place in walked if left[place]]
    others = set(walked).difference(waiting)
    while waiting:
        for below in map(places.get, map(id, gc.get_referents(part[waiting.pop()]))):
            if below is not None and not left[below]:
                left[below] = True
                if below in others:
                    waiting.append(below)


def _name(part: List[Any], above: List[int], place: int) -> Name:
    """Returns the class or function of the nearest object above a tensor that has one, or else the class of the nearest."""
    nearest = above[place]
    for _ in range(_DEEPEST):
        place = above[place]
        if place < 0:
            break
        kind = type(part[place])
        if kind is FrameType:
            return _name_of_code(part[place].f_code)
        if kind is FunctionType:
            return _name_of_code(part[place].__code__)
        if kind is GeneratorType:
            return _name_of_code(part[place].gi_code)
        if not only_leads(kind):
            return Name("cycle", class_text(kind, "__qualname__"), "", "")
    return Name("cycle", class_text(type(part[nearest]), "__qualname__"), "", "")


def _name_of_code(code: CodeType) -> Name:
    return Name("cycle", function_of(code), "", place_of(code))
