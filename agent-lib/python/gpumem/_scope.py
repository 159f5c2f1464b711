"""``scope``: names the memory that a thread allocates.

The agent keeps one word for each thread with the number of the innermost tag. Opening a scope writes that word through
a memoryview, and closing it restores the previous value. The memoryview has no dimension, so its only item is ``word[()]``:
CPython reads and writes that a quarter faster than ``word[0]``. Only the first use of a name inside a given outer scope
calls into the library.

Special cases of one word for each thread:

=====================================  ============================================================
a scope is closed out of order         the word keeps the innermost open scope's tag, and returns to
(generators, coroutines)               the next scope still open when that one closes
a scope is closed on another thread    the word of the opening thread is corrected, if that thread still runs
a thread ends                          its word is reused by the next thread; open scopes stop using it
fork                                   the child's agent is inactive; scopes do nothing until CUDA starts in the child
torch.compile                          scopes vanish from compiled code: ``is_dynamo_compiling`` is a constant to Dynamo
=====================================  ============================================================
"""

import ctypes
import functools
import importlib.util
import os
import re
import sys
import threading
import weakref
from types import TracebackType
from typing import Any, AsyncIterator, Callable, Dict, Generator, List, Optional, Tuple, Type, TypeVar, cast

from ._library import library, text, when_found

_F = TypeVar("_F", bound=Callable[..., Any])

#: Outer tag -> name -> tag.
_tags: Dict[int, Dict[str, int]] = {}
#: Cached names; when a program exceeds this, the cache is cleared.
_MOST = 100_000
_kept = 0
_modules = sys.modules


def _torch_version() -> Optional[Tuple[int, int]]:
    """Returns the installed PyTorch's version without importing it; (0, 0) if it cannot be read, ``None`` if absent."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            found = re.search(r"^__version__ = '(\d+)\.(\d+)", file.read(), re.M)
        return (int(found[1]), int(found[2])) if found else (0, 0)
    except (ImportError, OSError, ValueError, AttributeError):
        return (0, 0)


_TORCH = _torch_version()


class _Thread:
    """State of a thread: its word in the agent, and its innermost open scope."""

    __slots__ = ("word", "top", "__weakref__")

    def __init__(self, word: Any) -> None:
        self.word = word
        self.top: Optional["scope"] = None


class _EdgeRecorder:
    """Replaces a thread's word while scope begins and ends are recorded: each write is a begin or an end.

    A scope that closes while inner scopes are open ends these as well.
    """

    __slots__ = ("word", "thread", "open", "report")

    def __init__(self, thread: _Thread, report: Callable[[int], None]) -> None:
        self.word, self.thread, self.report = thread.word, thread, report
        #: Scopes opened since recording started, each with its tag.
        self.open: List[Tuple["scope", int]] = []

    def __getitem__(self, place: Tuple[()]) -> int:
        return int(self.word[place])

    def __setitem__(self, place: Tuple[()], tag: int) -> None:
        top = self.thread.top
        is_new = top is not None and all(top is not begun for begun, _ in self.open)
        if top is not None and is_new and top._outer == self.word[place]:
            self.open.append((top, tag))
            self.word[place] = tag
            self.report(1)
            return
        while self.open and self.open[-1][0] is not top:
            self.word[place] = self.open.pop()[1]
            self.report(0)
        self.word[place] = tag


#: Threads that have opened scopes, until they end.
_threads: "weakref.WeakSet[_Thread]" = weakref.WeakSet()
#: Reports a begin (1) or end (0) to the agent; ``None`` while edges are not recorded.
_report_edge: Optional[Callable[[int], None]] = None


def record_edges(wanted: bool) -> None:
    """Switches recording of begin and end on or off for scopes that are opened from now on."""
    global _report_edge
    found = library()
    _report_edge = found.scope_edge if wanted and found is not None else None
    for thread in list(_threads):
        word = thread.word
        if _report_edge is not None and not isinstance(word, (_EdgeRecorder, dict)):
            thread.word = _EdgeRecorder(thread, _report_edge)
        elif _report_edge is None and isinstance(word, _EdgeRecorder):
            thread.word = word.word


class _ThreadEnd:
    """Lives as long as its thread; then detaches the thread's word from scopes that are still open."""

    __slots__ = ("thread",)

    def __init__(self, thread: _Thread) -> None:
        self.thread = thread

    def __del__(self) -> None:
        self.thread.word = {(): 0}


#: ``mine`` is the thread's _Thread; ``ended`` detects the end of the thread.
_here: Any = threading.local()


class scope:
    """Tags memory inside ``with gpumem.scope("name"): ...`` or a function decorated with ``@gpumem.scope("name")``.

    Allocations of this thread get the tag ``outer/name``. Scopes nest, also with those of the C API and of NVTX. ``name``
    may contain ``/``. Use one object on one thread at a time.

    For a decorated coroutine function, generator function or asynchronous generator function, the scope is open while that
    function runs and closed while it is suspended. A ``with`` block around an ``await`` or a ``yield`` stays open while
    suspended, so it also tags allocations of the thread's other coroutines.
    """

    __slots__ = ("_name", "_here", "_outer", "_below")
    _outer: int
    _below: Optional["scope"]

    _name: str
    #: State of the thread that opened it; ``None`` while closed.
    _here: Optional[_Thread]

    if _TORCH is not None and _TORCH < (2, 5):
        # Dynamo before 2.5 does not treat classes with __init__ as context managers. This variant costs 75 ns more.
        def __new__(cls, name: str) -> "scope":
            self = object.__new__(cls)
            self._name = name
            self._here = None
            return self

    else:

        def __init__(self, name: str) -> None:
            self._name = name
            self._here = None

    def __enter__(self) -> "scope":
        if _skip is not None and _skip():
            return self
        try:
            here: _Thread = _here.mine
        except AttributeError:
            here = _begin() or _NOWHERE
            if here is _NOWHERE:
                return self
        if self._here is not None:
            again = _Reentry(self._name)
            again.of = self
            return again.__enter__()
        word = here.word
        self._outer = outer = word[()]
        self._below = here.top
        self._here = here
        here.top = self
        try:
            word[()] = _tags[outer][self._name]
        except KeyError:
            word[()] = _intern(outer, self._name)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        here = self._here
        if here is None:
            return
        if here.top is self:
            here.top = self._below
            here.word[()] = self._outer
            self._here = None
        else:
            _close(here, self)

    def __call__(self, function: _F) -> _F:
        import inspect  # 10 ms, for those that decorate

        name = self._name
        wrapped: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                return await _ScopedAwaitable(name, function(*args, **kwargs))

        elif inspect.isasyncgenfunction(function):

            async def wrapped(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                inner = function(*args, **kwargs)
                step, argument = inner.asend, None
                while True:
                    try:
                        item = await _ScopedAwaitable(name, step(argument))
                    except StopAsyncIteration:
                        return
                    try:
                        argument = yield item
                        step = inner.asend
                    except GeneratorExit:
                        await _ScopedAwaitable(name, inner.aclose())
                        raise
                    except BaseException as error:
                        step, argument = inner.athrow, error

        elif inspect.isgeneratorfunction(function):

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return (yield from _stepped(name, function(*args, **kwargs)))

        else:

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with scope(name):
                    return function(*args, **kwargs)

        return cast(_F, functools.wraps(function)(wrapped))

    def __repr__(self) -> str:
        return "gpumem.scope({!r})".format(self._name)


def _stepped(name: str, inner: Any) -> Generator[Any, Any, Any]:
    """Runs ``yield from inner`` with the scope open only while ``inner`` runs."""
    step, argument = getattr(inner, "send", None), None
    if step is None:  # an iterator
        step = lambda _: next(inner)  # noqa: E731
    while True:
        with scope(name):
            try:
                item = step(argument)
            except StopIteration as end:
                return end.value
        try:
            argument = yield item
            step = inner.send
        except GeneratorExit:
            with scope(name):
                inner.close()
            raise
        except BaseException as error:
            step, argument = inner.throw, error


class _ScopedAwaitable:
    """Awaitable that opens the scope only while the inner awaitable runs."""

    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __await__(self) -> Generator[Any, Any, Any]:
        return _stepped(self._name, self._inner.__await__())


#: Stands for a thread while nothing is recorded.
_NOWHERE = _Thread({(): 0})


class _Reentry(scope):
    """Entry of a scope object that is already open."""

    __slots__ = ("of",)

    of: scope


def _close(here: _Thread, closed: scope) -> None:
    """Closes a scope that is not the innermost or was entered twice: the scope above it inherits its outer scope."""
    above: Optional[scope] = None
    each = here.top
    while each is not None and each is not closed and getattr(each, "of", None) is not closed:
        above, each = each, each._below
    if each is None:
        return
    if above is None:
        here.top = each._below
        here.word[()] = each._outer
    else:
        above._below, above._outer = each._below, each._outer
    each._here = None


def _begin() -> Optional[_Thread]:
    """Creates this thread's state at its first scope; ``None`` without an agent."""
    found = library()
    address = found.scope_word() if found is not None else None
    if not address:
        return None
    thread = _Thread(memoryview(ctypes.c_uint32.from_address(address)).cast("B").cast("I", ()))
    _threads.add(thread)
    if _report_edge is not None:
        thread.word = _EdgeRecorder(thread, _report_edge)
    _here.mine = thread
    _here.ended = _ThreadEnd(thread)
    return thread


def _intern(outer: int, name: str) -> int:
    """Returns the tag of a name inside an outer tag, from the agent, and caches it."""
    global _kept
    found = library()
    if found is None or not found.available():
        return outer
    # An empty name opens nothing; 0 means the agent's name table is full.
    tag = (found.intern(outer, text(name)) if name else 0) or outer
    _kept += 1
    if _kept > _MOST:
        _tags.clear()
        _kept = 1
    _tags.setdefault(outer, {})[name] = tag
    return tag


# Values of `_skip`: each returns whether a scope does nothing. Exactly one is active, so the check costs one call.


def _find_agent() -> bool:
    """Initial state: looks for an agent."""
    if library() is not None:
        return _agent_found()
    global _skip
    _skip = _no_agent
    return True


def _no_agent() -> bool:
    """No agent was found."""
    return True


def _no_torch_yet() -> bool:
    """An agent was found and torch is not imported yet."""
    return _torch_found() if "torch" in _modules else False


def _torch_found() -> bool:
    """Returns whether Dynamo traces this call; compiled code keeps only the first return."""
    is_compiling = getattr(getattr(_modules["torch"], "compiler", None), "is_dynamo_compiling", None)
    if is_compiling is not None:
        if is_compiling():
            return True
        _set_skip(is_compiling)
    return False


def _set_skip(is_compiling: Callable[[], bool]) -> None:
    global _skip
    _skip = is_compiling


def in_compiled_code() -> bool:
    """Returns whether Dynamo traces this call. Callers then do nothing, which avoids a graph break."""
    is_compiling = getattr(getattr(_modules.get("torch"), "compiler", None), "is_dynamo_compiling", None)
    return is_compiling is not None and bool(is_compiling())


_calls = 0


def _forked() -> bool:
    """State in a forked child, whose agent is inactive until CUDA starts. Checks become rarer, as in gpumem.h."""
    global _calls
    _calls += 1
    if _calls & 1023 if _calls > 1024 else _calls & (_calls - 1):
        return True
    found = library()
    if found is None or not found.available():
        return True
    return _agent_found()


#: ``None`` if an agent was found and torch cannot be imported.
_skip: Optional[Callable[[], bool]] = _find_agent


def _agent_found() -> bool:
    global _skip
    _skip = None if _TORCH is None and "torch" not in _modules else _no_torch_yet
    return _skip is not None and _skip()


def _agent_appeared() -> None:
    if _skip is _no_agent:
        _agent_found()


def _after_fork() -> None:
    global _skip, _calls
    _calls = 0
    if _skip is not _no_agent:
        _skip = _forked


when_found.append(_agent_appeared)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
