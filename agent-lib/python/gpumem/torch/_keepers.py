"""Finds the variables that keep CUDA tensors when memory runs out.

PyTorch calls its observers after a request has failed, with the GIL, before it raises the error. After the first failures of
a process, references are followed backwards from samples of all tensors (`gc.get_referrers`) to names: global and local
variables, attributes, closures. What a name holds is then counted exactly.

Runs no code of the program: reads types, references and C-level getters, and computes nothing. Its own references end before
the program goes on.
"""

import gc
import os
import sys
import time
from collections import deque
from types import (
    CellType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from ._agent import functions, text
from ._objects import classes, count_objects, count_references, instances, referenced
from ._variables import Name, Running, file_of, function_of, global_names

#: Failed requests of a process after which objects are scanned.
SCANS = 3
#: Seconds after which a scan begins no further pass over all objects, and counts no further: of CPU time, and of any time if
#: others use the processors. A pass takes 0.1 to 0.3 s for a million objects.
CPU_SECONDS, SECONDS = 1.0, 5.0
#: Maximum interval at which the program lets threads change, in seconds; see `_Alone`.
_SLOWEST_SWITCH = 0.05
#: Maximum number of tracked objects, and of references from lists, tuples, dicts and sets.
_MOST_OBJECTS, _MOST_REFERENCES = 4_000_000, 20_000_000
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

#: Kinds of objects, and of classes derived from them, that only lead to others.
_GROUPS = (list, tuple, dict, set, frozenset, deque, BaseException)
#: Modules whose classes lead to others, although some releases define them like classes of a program.
_BUILTIN = ("builtins", "collections", "functools", "itertools")
#: Bit of the flags of a class that was made at run time.
_HEAP_TYPE = 1 << 9
#: Kinds of names, the best first, if several hold the same object.
_KINDS = ("attribute", "global", "cache", "default", "local", "closure")


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


def _class_text(kind: type, attribute: str) -> str:
    return str(type.__dict__[attribute].__get__(kind))


def _members(kind: type) -> List[Dict[str, Any]]:
    """Returns the variables of a class and of its bases, without running code of a metaclass."""
    return [type.__dict__["__dict__"].__get__(base) for base in type.__dict__["__mro__"].__get__(kind)]


def _attributes(thing: Any) -> Any:
    """Returns the `__dict__` of an instance, without running code of its class; `None` without one."""
    getter = next((members["__dict__"] for members in _members(type(thing)) if "__dict__" in members), None)
    return getter.__get__(thing) if type(getter) is GetSetDescriptorType else None


def _key(variables: Any, value: Any) -> str:
    """Returns the name of a value in a dict of variables, or in those of a class."""
    kind = type(variables)
    if not issubclass(kind, dict) and kind is not MappingProxyType:
        return ""
    items = dict.items(variables) if issubclass(kind, dict) else variables.items()
    names = [name for name, other in list(items) if other is value]
    return names[0] if names and type(names[0]) is str else ""


def _slot(thing: Any, value: Any) -> str:
    """Returns the name of the slot of an instance that holds a value."""
    for members in _members(type(thing)):
        for name, slot in members.items():
            if type(slot) is MemberDescriptorType and not name.startswith("__"):
                try:
                    if slot.__get__(thing) is value:
                        return str(name)
                except AttributeError:  # an empty slot
                    pass
    return ""


def _only_leads(kind: type) -> bool:
    """Returns whether objects of this kind have no name of their own: they are built into the interpreter, or group others."""
    is_builtin = not type.__dict__["__flags__"].__get__(kind) & _HEAP_TYPE or _class_text(kind, "__module__") in _BUILTIN
    return is_builtin or issubclass(kind, _GROUPS)


class Deadline:
    """The end of a scan's time: CPU time of this thread, and the longest time that the program waits."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, seconds: float = SECONDS) -> None:
        self.cpu_end = time.thread_time() + cpu_seconds
        self.end = time.monotonic() + seconds

    def is_over(self) -> bool:
        return time.thread_time() > self.cpu_end or time.monotonic() > self.end


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

    def follow(self, tensors: List[Any]) -> None:
        """Finds the names that lead to these tensors; empties the list."""
        level = [_Node(tensor, None) for tensor in tensors]
        tensors.clear()
        seen = {id(node.thing) for node in level}
        for node in level:
            self._store_local(node)
        for _ in range(_DEEPEST):
            if not level:
                return
            if self.deadline.is_over():
                break
            new = [node for node in self._above(level[:_WIDEST]) if id(node.thing) not in seen]
            seen.update(id(node.thing) for node in new)
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
            return Name("global", _key(thing, below.thing), "", self.globals[id(thing)]), below
        if kind is FunctionType:
            return self._name_of_function(thing, below)
        if _is_lru_cache(kind):
            wrapped = _attributes(thing).get("__wrapped__")
            code = wrapped.__code__ if type(wrapped) is FunctionType else None
            function, place = (function_of(code), _place(code)) if code is not None else ("", "")
            return Name("cache", "", function, place), node
        is_class = issubclass(kind, type)
        if not is_class and (_only_leads(kind) or issubclass(kind, self.links)):
            return None
        variables = type.__dict__["__dict__"].__get__(thing) if is_class else _attributes(thing)
        if type(below.thing) is dict and below.below is not None and (is_class or below.thing is variables):
            below = below.below
        attribute = _key(variables, below.thing) if variables is not None else ""
        attribute = attribute or ("" if is_class else _slot(thing, below.thing))
        owner = _class_text(thing if is_class else kind, "__qualname__")
        return Name("attribute", owner + "." + attribute if attribute else owner, "", ""), below

    def _name_of_function(self, function: Any, below: _Node) -> Optional[Tuple[Name, _Node]]:
        code, value = function.__code__, below.below
        if value is None:
            return None
        if below.thing is function.__closure__ and value.below is not None:
            names = [name for name, cell in zip(code.co_freevars, below.thing) if cell is value.thing]
            return Name("closure", names[0] if names else "", function_of(code), _place(code)), value.below
        if below.thing is function.__defaults__ or below.thing is function.__kwdefaults__:
            return Name("default", "", function_of(code), _place(code)), value
        if type(below.thing) is dict:
            return Name("attribute", function_of(code) + "." + _key(below.thing, value.thing), "", _place(code)), value
        return None

    def rows(self) -> List[Row]:
        """Counts what each name holds. Returns the names that hold most, without those that hold parts of others."""
        counted = []
        for name, thing in self.found.items():
            held, in_traceback, is_partial = self._count(thing)
            by_storage = {self.table[address].storage: self.table[address].bytes for address in held}
            with_graph = sum(self.table[address].has_graph for address in held)
            size = sum(by_storage.values())
            partial = self.is_partial or is_partial
            kind = _class_text(type(thing), "__qualname__")
            row = Row(name, kind, len(held), size, with_graph, in_traceback, partial)
            if len(held) >= _LEAST_TENSORS:
                counted.append((row, held))
        counted.sort(key=lambda pair: (-pair[0].bytes, -pair[0].tensors, _KINDS.index(pair[0].name.kind)))
        kept: List[Tuple[Row, Set[int]]] = []
        for row, held in counted:
            if not any(held <= other for _, other in kept):
                kept.append((row, held))
        # A list of losses holds few bytes itself, and its graphs many.
        graphs = sorted(kept, key=lambda pair: -pair[0].with_graph)[:1]
        chosen = kept[:_ROWS] + [pair for pair in graphs if pair not in kept[:_ROWS]]
        return [row for row, _ in chosen]

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
        return issubclass(kind, (*_GROUPS, *self.links)) or kind in (CellType, TracebackType, FrameType)


def _summands(tensor: Any) -> int:
    """Returns how many tensors were added up one by one to a tensor, with their graphs."""
    count, node = 0, tensor.grad_fn
    while node is not None and count < _MOST_SUMMANDS and type(node).__name__ == "AddBackward0":
        count += 1
        before = [part for part, _ in node.next_functions]
        node = next((part for part in before if type(part).__name__ == "AddBackward0"), None)
    return count


def _is_lru_cache(kind: type) -> bool:
    return _class_text(kind, "__module__") == "functools" and _class_text(kind, "__name__") == "_lru_cache_wrapper"


def _place(code: Any) -> str:
    return "%s:%d" % (file_of(code.co_filename), code.co_firstlineno)


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


def _tensors(torch: Any) -> List[Tuple[Any, Held]]:
    """Returns the tensors on GPUs that Python objects refer to, except those of models, gradients and optimizers."""
    # Most tensors of a graph are kept by the graph alone, and end with it on any thread.
    plain_addresses = set(map(id, instances([torch.Tensor])))
    kept = referenced(plain_addresses) | (Running().names.keys() & plain_addresses)
    modules, optimizers = classes(torch.nn.Module), classes(torch.optim.Optimizer)
    objects = instances([torch.Tensor, torch.nn.Parameter, *modules, *optimizers])
    of_modules, of_optimizers = set(map(id, modules)), set(map(id, optimizers))
    known: List[Any] = []
    plain: List[Any] = []
    with torch._C.DisableTorchFunction():
        for thing in objects:
            kind = type(thing)
            if kind is torch.Tensor:
                if id(thing) in kept:
                    plain.append(thing)
            elif kind is torch.nn.Parameter:
                known += [thing, thing._grad] if thing.is_leaf else [thing]
            elif id(kind) in of_modules:
                known += _values(_values([_attributes(thing)], "_buffers"))
            elif id(kind) in of_optimizers:
                known += _values(_values(_values([_attributes(thing)], "state")))
        excluded = {held.storage for held in map(_held, known) if held is not None}
        found = [(tensor, _held(tensor)) for tensor in plain]
    return [(tensor, held) for tensor, held in found if held is not None and held.storage not in excluded]


def _values(groups: List[Any], key: Any = None) -> List[Any]:
    """Returns the values in dicts, or those of one key."""
    found: List[Any] = []
    for group in groups:
        if issubclass(type(group), dict):
            found += dict.values(group) if key is None else [dict.get(group, key)]
    return found


def _held(tensor: Any) -> Optional[Held]:
    """Describes a tensor on a GPU; `None` for anything else, and without a storage."""
    if type(tensor) not in _tensor_kinds():
        return None
    try:
        if not tensor.is_cuda:
            return None
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if type(size) is not int:  # of a compiler: it would note each comparison
            return None
        return Held(storage._cdata, size, tensor.requires_grad and not tensor.is_leaf)
    except Exception:  # of a transform, or of a compiler
        return None


def _tensor_kinds() -> Tuple[type, ...]:
    torch = sys.modules["torch"]
    return torch.Tensor, torch.nn.Parameter


def _may_scan() -> bool:
    """Returns whether a scan disturbs nobody: other threads wait for the GIL, and no function of the program sees each call."""
    has_gil = bool(getattr(sys, "_is_gil_enabled", lambda: True)())
    is_seen = sys.gettrace() is not None or sys.getprofile() is not None
    return has_gil and not is_seen and sys.getswitchinterval() <= _SLOWEST_SWITCH


class _Alone:
    """Keeps other threads and the garbage collector from running during a scan.

    The scan refers to objects of other threads. A tuple under construction with a second reference raises SystemError when its
    constructor resizes it, and objects that other threads drop would end here.
    """

    def __init__(self) -> None:
        self.interval = sys.getswitchinterval()
        self.collects = gc.isenabled()

    def __enter__(self) -> None:
        sys.setswitchinterval(SECONDS)
        # A thread that waits already asks for the GIL after the old interval. It gets it now, while nothing is held.
        end = time.monotonic() + 2 * self.interval
        while time.monotonic() < end:
            pass
        self.collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: Any) -> None:
        if self.collects:
            gc.enable()
        sys.setswitchinterval(self.interval)


def _is_own(error: BaseException) -> bool:
    """Returns whether an error was raised by the scan, and not by a signal handler of the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__") if trace is not None else __name__
    return type(module) is str and module.partition(".")[0] in ("gpumem", "torch")


class Keepers:
    """The agent's observer of failed requests."""

    def __init__(self) -> None:
        self.left = SCANS
        self.is_attached = self.is_queued = False
        self.process = os.getpid()

    def attach(self, torch: Any) -> None:
        """Attaches the observer, at the latest when the program has initialised CUDA."""
        # Since 2.0. Observers cannot be removed, and a second one would scan again.
        is_known = hasattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer")
        if self.is_attached or not is_known or not functions.keepers_wanted():
            return
        if torch.cuda.is_initialized():
            self._attach()
        elif not self.is_queued:  # attaching would initialise CUDA
            self.is_queued = True
            # PyTorch calls these at the end of the initialisation, during which this may run. Its function for adding one
            # waits for a lock that the main thread may hold.
            calls = getattr(torch.cuda, "_queued_calls", None)
            if type(calls) is list:
                calls.append((self._attach, []))

    def _attach(self) -> None:
        if self.is_attached or self.process != os.getpid():
            return
        self.is_attached = True
        try:
            sys.modules["torch"]._C._cuda_attach_out_of_memory_observer(self.on_failure)
        except Exception:  # the program's allocator has no observers
            pass

    def on_failure(self, *_: Any) -> None:
        """Scans objects after a failed request, and reports the names that keep tensors."""
        if self.left > 0 and _may_scan():
            self.left -= 1
            try:
                with _Alone():
                    self._scan(sys.modules["torch"])
            except Exception as error:
                if not _is_own(error):
                    # Without the frames of the scan, whose variables refer to objects of the program.
                    raise error.with_traceback(None)

    def _scan(self, torch: Any) -> None:
        deadline = Deadline()
        if count_objects() <= _MOST_OBJECTS and count_references() <= _MOST_REFERENCES:
            tensors = _tensors(torch)
            with torch._C.DisableTorchFunction():
                rows = find(tensors, (torch.Tensor,), deadline)
            if rows:
                functions.keepers(text("\n".join(row.line() for row in rows)))
