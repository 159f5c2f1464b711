"""Finds the variables that keep CUDA tensors.

References are followed backwards from samples of all tensors (`gc.get_referrers`) to names: global and local variables,
attributes, closures. What a name holds is then counted exactly.

Runs no code of the program: reads types, references and C-level getters, and computes nothing. Its own references end before
the program goes on.
"""

import gc
from collections import Counter
from itertools import chain
from types import CellType, FrameType, FunctionType, TracebackType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from . import _cycles
from ._objects import GROUPS, Deadline, attributes, class_text, instances, is_lru_cache, key, only_leads, slot
from ._variables import Name, Running, function_of, global_names, place_of

#: Tensors from which references are followed: among all by bytes, and among those with a graph.
_SAMPLES = 8
#: Objects that the interpreter itself has frozen (375 in Python 3.12) are fewer.
_OWN_FROZEN = 1_000
#: Maximum number of references from a name to a tensor; of objects whose referrers are searched in one pass; of objects that
#: are counted for a name; of names that are reported.
_DEEPEST, _WIDEST, _MOST_COUNTED, _ROWS = 10, 24, 300_000, 5
#: Maximum number of sums that are reported, and of their summands that are counted; maximum bytes of a tensor with one value.
_SUMS, _MOST_SUMMANDS, _SCALAR = 2, 20_000, 8
#: A sum of fewer tensors is the loss of one step: one of several outputs, or layers.
_LEAST_SUMMANDS = 16
#: Number of objects that are counted between two looks at the clock.
_CHECKED = 256
#: A variable with fewer tensors is not a store: a batch, the outputs of a step.
_LEAST_TENSORS = 4
#: Maximum length of a name, in characters.
_LONGEST = 120
#: Kinds of names, the best first, if several hold the same object.
_KINDS = ("cycle", "attribute", "global", "cache", "default", "local", "closure")


class Held(NamedTuple):
    """A tensor on the GPU."""

    storage: int
    bytes: int
    has_graph: bool


class Row(NamedTuple):
    """A name, and the tensors that it keeps."""

    name: Name
    container: str
    tensors: int
    bytes: int
    with_graph: int
    in_traceback: bool
    is_partial: bool
    #: Whether the name is that of one tensor, the sum of `with_graph` others.
    is_sum: bool = False

    def line(self) -> str:
        """Returns the row as a line of `Body::Keepers`."""
        flags = ["traceback"] * self.in_traceback + ["partial"] * self.is_partial + ["sum"] * self.is_sum
        texts = [_clean(part) for part in (*self.name, self.container)]
        return "\t".join([*texts, str(self.tensors), str(self.bytes), str(self.with_graph), ",".join(flags)])


def _clean(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name[:_LONGEST])


class _Node:
    """An object on a way from a tensor to a name; `below` is the object that it refers to."""

    __slots__ = ("below", "thing")

    def __init__(self, thing: Any, below: Optional["_Node"]) -> None:
        self.thing = thing
        self.below = below


class Search:
    """One search of names. `table` has the tensors by object address; objects of `links` have no names of their own."""

    def __init__(self, table: Dict[int, Held], links: Tuple[type, ...], deadline: Deadline) -> None:
        #: Single tensors with a graph, by name.
        self.single: Dict[Name, Any] = {}
        self.table = table
        self.links = links
        self.deadline = deadline
        self.is_partial = gc.get_freeze_count() > _OWN_FROZEN  # such objects are not listed
        self.running = Running()
        self.globals = global_names()
        #: Names and the objects that they hold.
        self.found: Dict[Name, Any] = {}
        #: Kinds of instances of which a store has many.
        self.members: Set[type] = set()
        #: Addresses of the tensors from which references are followed, and kinds of the objects on the ways from them.
        self.samples: Set[int] = set()
        self.kinds: Set[type] = set()

    def follow(self, tensors: List[Any]) -> None:
        """Finds the names that lead to these tensors; empties the list."""
        level = [_Node(tensor, None) for tensor in tensors]
        tensors.clear()
        seen = {id(node.thing) for node in level}
        self.samples.update(seen)
        for node in level:
            self._store_local(node)
        for _ in range(_DEEPEST):
            if not level:
                return
            if self.deadline.is_over():
                break
            new = [node for node in self._above(level[:_WIDEST]) if id(node.thing) not in seen]
            seen.update(id(node.thing) for node in new)
            self.kinds.update(type(node.thing) for node in new)
            level = self._unnamed(new)
        self.is_partial = True

    def _above(self, level: List[_Node]) -> List[_Node]:
        """Returns the objects that refer to those of a level."""
        by_address = {id(node.thing): node for node in level}
        targets = tuple(node.thing for node in level)  # passed as it is, so that its address is known
        own = {id(targets), id(self.found), id(self.single), *self.running.frames}
        above = []
        for thing in gc.get_referrers(*targets):
            is_own = type(thing) is FrameType and thing.f_globals is globals()
            if id(thing) not in own and type(thing) is not _Node and not is_own:
                nodes = map(by_address.get, map(id, gc.get_referents(thing)))
                above += [_Node(thing, node) for node in [next(filter(None, nodes), None)] if node is not None]
        return above

    def _unnamed(self, nodes: List[_Node]) -> List[_Node]:
        """Stores the objects with a name. Returns those that lead to names: groups, and instances that are many."""
        left: List[_Node] = []
        owners: Dict[Name, List[Tuple[_Node, _Node]]] = {}
        for node in nodes:
            self._store_local(node)
            named = self._name(node)
            if named is None:
                left.append(node)
            elif type(node.thing) is FunctionType or issubclass(type(node.thing), type) or named[0].kind != "attribute":
                self._store(*named)
            else:
                owners.setdefault(named[0], []).append((node, named[1]))
        for name, same in owners.items():
            if len(same) > 1 or type(same[0][0].thing) in self.members:
                self.members.update(type(node.thing) for node, _ in same)
                left += [node for node, _ in same]
            else:
                self._store(name, same[0][1])
        return left

    def _store_local(self, node: _Node) -> None:
        name = self.running.names.get(id(node.thing))
        if name is not None:
            self._store(name, node.below if type(node.thing) is CellType and node.below is not None else node)

    def _store(self, name: Name, node: _Node) -> None:
        held = self.table.get(id(node.thing))
        if held is None:
            self.found.setdefault(name, node.thing)
        elif held.has_graph:
            self.single.setdefault(name, node.thing)

    def sums(self) -> List[Row]:
        """Returns the names of tensors that are sums of many tensors with graphs, such as `total = total + loss`."""
        found: List[Row] = []
        for name, tensor in self.single.items():
            if len(found) >= _SUMS or self.deadline.is_over():
                break
            count = _summands(tensor) if self.table[id(tensor)].bytes <= _SCALAR else 0
            if count >= _LEAST_SUMMANDS:
                size = self.table[id(tensor)].bytes
                found.append(Row(name, type(tensor).__name__, 1, size, count, False, self.is_partial, True))
        return found

    def _name(self, node: _Node) -> Optional[Tuple[Name, _Node]]:
        """Returns the name that an object gives to one below it; `None` if it only leads to a name."""
        thing, kind, below = node.thing, type(node.thing), node.below
        if below is None:
            return None
        if id(thing) in self.globals:
            return Name("global", key(thing, below.thing), "", self.globals[id(thing)]), below
        if kind is FunctionType:
            return self._name_of_function(thing, below)
        if is_lru_cache(kind):
            wrapped = attributes(thing).get("__wrapped__")
            code = wrapped.__code__ if type(wrapped) is FunctionType else None
            function, place = (function_of(code), place_of(code)) if code is not None else ("", "")
            return Name("cache", "", function, place), node
        is_class = issubclass(kind, type)
        if not is_class and (only_leads(kind) or issubclass(kind, self.links)):
            return None
        variables = type.__dict__["__dict__"].__get__(thing) if is_class else attributes(thing)
        if type(below.thing) is dict and below.below is not None and (is_class or below.thing is variables):
            below = below.below
        attribute = key(variables, below.thing) if variables is not None else ""
        attribute = attribute or ("" if is_class else slot(thing, below.thing))
        owner = class_text(thing if is_class else kind, "__qualname__")
        return Name("attribute", owner + "." + attribute if attribute else owner, "", ""), below

    def _name_of_function(self, function: Any, below: _Node) -> Optional[Tuple[Name, _Node]]:
        code, value = function.__code__, below.below
        if value is None:
            return None
        if below.thing is function.__closure__ and value.below is not None:
            names = [name for name, cell in zip(code.co_freevars, below.thing) if cell is value.thing]
            return Name("closure", names[0] if names else "", function_of(code), place_of(code)), value.below
        if below.thing is function.__defaults__ or below.thing is function.__kwdefaults__:
            return Name("default", "", function_of(code), place_of(code)), value
        if type(below.thing) is dict:
            return Name("attribute", function_of(code) + "." + key(below.thing, value.thing), "", place_of(code)), value
        return None

    def rows(self) -> List[Row]:
        """Counts what each name holds. Returns the names that hold most, without those that hold parts of others."""
        counted = [pair for pair in self._of_names() if pair[0].tensors >= _LEAST_TENSORS]
        counted += self._of_cycles(set().union(*(held for row, held in counted if row.name.kind != "attribute")))
        counted.sort(key=lambda pair: (-pair[0].bytes, -pair[0].tensors, _KINDS.index(pair[0].name.kind)))
        kept: List[Tuple[Row, Set[int]]] = []
        for row, held in counted:
            if not any(held <= other for _, other in kept):
                kept.append((row, held))
        # A list of losses holds few bytes itself, and its graphs many.
        graphs = sorted(kept, key=lambda pair: -pair[0].with_graph)[:1]
        chosen = kept[:_ROWS] + [pair for pair in graphs if pair not in kept[:_ROWS]]
        return [row for row, _ in chosen]

    def _of_names(self) -> Iterator[Tuple[Row, Set[int]]]:
        for name, thing in self.found.items():
            held, in_traceback, is_partial = self._count(thing)
            container = class_text(type(thing), "__qualname__")
            yield self._row(name, container, held, in_traceback, self.is_partial or is_partial), held

    def _of_cycles(self, held_elsewhere: Set[int]) -> List[Tuple[Row, Set[int]]]:
        """Returns what reference cycles keep, if some samples are not held by a variable, which is in no cycle."""
        if self.samples <= held_elsewhere or gc.get_freeze_count() > _OWN_FROZEN:
            return []
        known = Counter(map(id, chain(self.found.values(), self.single.values())))
        excluded = self.running.frames | self.globals.keys() | {id(self.found), id(self.single)}
        found = _cycles.find(self.kinds, self.table, known, excluded, self.deadline)
        # The storage of a view is not freed with it.
        of_cycles = set(chain.from_iterable(found.values()))
        elsewhere = {one.storage for address, one in self.table.items() if address not in of_cycles}
        kept = {name: {one for one in held if self.table[one].storage not in elsewhere} for name, held in found.items()}
        return [(self._row(name, "", held, False, False), held) for name, held in kept.items() if held]

    def _row(self, name: Name, container: str, held: Set[int], in_traceback: bool, is_partial: bool) -> Row:
        by_storage = {self.table[address].storage: self.table[address].bytes for address in held}
        with_graph = sum(self.table[address].has_graph for address in held)
        return Row(name, container, len(held), sum(by_storage.values()), with_graph, in_traceback, is_partial)

    def _count(self, container: Any) -> Tuple[Set[int], bool, bool]:
        """Returns the tensors that an object holds, whether a traceback leads to any, and whether some were not counted."""
        held: Set[int] = set()
        seen: Set[int] = set()
        in_traceback = False
        waiting = [container]
        while waiting:
            thing = waiting.pop()
            if id(thing) in seen or id(thing) in self.globals or id(thing) in self.running.frames:
                continue
            if len(seen) >= _MOST_COUNTED or (len(seen) % _CHECKED == 0 and self.deadline.is_over()):
                return held, in_traceback, True
            seen.add(id(thing))
            kind = type(thing)
            if id(thing) in self.table:
                held.add(id(thing))
            elif thing is container or kind in self.members or self._is_counted(kind):
                in_traceback = in_traceback or kind is TracebackType
                waiting += gc.get_referents(thing)
        return held, in_traceback, False

    def _is_counted(self, kind: type) -> bool:
        return issubclass(kind, (*GROUPS, *self.links)) or kind in (CellType, TracebackType, FrameType)


def _summands(tensor: Any) -> int:
    """Returns how many tensors were added up one by one to a tensor, with their graphs."""
    count, node = 0, tensor.grad_fn
    while node is not None and count < _MOST_SUMMANDS and type(node).__name__ == "AddBackward0":
        count += 1
        before = [part for part, _ in node.next_functions]
        node = next((part for part in before if type(part).__name__ == "AddBackward0"), None)
    return count


def _samples(table: Dict[int, Held], addresses: List[int]) -> Set[int]:
    """Returns tensors at equal distances in the sum of all bytes, among those with a graph, and among losses."""
    chosen: Set[int] = set()
    weights: Tuple[Callable[[Held], int], ...] = (
        lambda held: held.bytes,
        lambda held: held.has_graph,
        lambda held: held.has_graph and held.bytes <= _SCALAR,
    )
    for weigh in weights:
        whole = sum(weigh(table[address]) for address in addresses)
        passed = taken = 0
        for address in addresses:
            passed += weigh(table[address])
            if passed * _SAMPLES > whole * (taken + 0.5):
                taken = passed * _SAMPLES // whole + 1
                chosen.add(address)
    return chosen


def find(tensors: List[Tuple[Any, Held]], links: Tuple[type, ...], deadline: Deadline) -> List[Row]:
    """Returns the names that keep these tensors; empties the list."""
    table = {id(tensor): held for tensor, held in tensors}
    kinds = {id(type(tensor)): type(tensor) for tensor, _ in tensors}
    tensors.clear()
    search = Search(table, links, deadline)
    local = search.running.names.keys() & table.keys()
    chosen = _samples(table, list(table))
    # A sum of losses is one tensor among all those of its graphs.
    scalars = [address for address in local if table[address].has_graph and table[address].bytes <= _SCALAR]
    chosen.update(scalars[:_SAMPLES])
    search.follow([one for one in instances(list(kinds.values())) if id(one) in chosen])
    return search.rows() + search.sums()
