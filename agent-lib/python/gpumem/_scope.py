"""``scope``: the name of what a thread allocates.

The agent keeps a word per thread with the number of the innermost tag. Opening a scope writes that word through a
memoryview and closing it puts back what was there: no foreign call, but for the first time that a name is used at a place.

What can go wrong with a word per thread, and what is done:

=====================================  ============================================================
a scope is closed out of order         the word stays the innermost open one's, and goes back
(generators, coroutines)               to what is still open when that closes
closed on another thread               the word of the thread that opened it is put right; of one that has ended, none
a thread ends                          its word belongs to the next thread that comes: what is still open lets go of it
fork                                   a child's agent is silent; scopes do nothing until CUDA begins in the child
torch.compile                          a scope inside of compiled code is not there: ``is_dynamo_compiling`` is a constant to Dynamo
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

#: outer tag -> name -> tag.
_tags: Dict[int, Dict[str, int]] = {}
#: Names kept; a program that makes them up without end begins anew.
_MOST = 100_000
_kept = 0
_modules = sys.modules


def _torch_version() -> Optional[Tuple[int, int]]:
    """Of the PyTorch that is installed, which need not be imported so far; (0, 0) if that cannot be told."""
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
    """What a thread has: its word, and the innermost scope that is open."""

    __slots__ = ("word", "top", "__weakref__")

    def __init__(self, word: Any) -> None:
        self.word = word
        self.top: Optional["scope"] = None


class _Told:
    """In the place of a thread's word while begins and ends of scopes are recorded: each time that it is written one begins or ends.

    One that is closed while others are open inside of it ends with them.
    """

    __slots__ = ("word", "thread", "open", "tell")

    def __init__(self, thread: _Thread, tell: Callable[[int], None]) -> None:
        self.word, self.thread, self.tell = thread.word, thread, tell
        #: Scopes that began since, and their tags.
        self.open: List[Tuple["scope", int]] = []

    def __getitem__(self, place: int) -> int:
        return int(self.word[place])

    def __setitem__(self, place: int, tag: int) -> None:
        top = self.thread.top
        is_new = top is not None and all(top is not begun for begun, _ in self.open)
        if top is not None and is_new and top._outer == self.word[place]:
            self.open.append((top, tag))
            self.word[place] = tag
            self.tell(1)
            return
        while self.open and self.open[-1][0] is not top:
            self.word[place] = self.open.pop()[1]
            self.tell(0)
        self.word[place] = tag


#: Those that have opened scopes; gone with the thread.
_threads: "weakref.WeakSet[_Thread]" = weakref.WeakSet()
#: Tells the agent of an edge; ``None``: nobody wants to know.
_tell: Optional[Callable[[int], None]] = None


def tell_edges(wanted: bool) -> None:
    """Scopes that are opened from now on are told with their begin and end, or no more."""
    global _tell
    found = library()
    _tell = found.scope_edge if wanted and found is not None else None
    for thread in list(_threads):
        word = thread.word
        if _tell is not None and not isinstance(word, (_Told, list)):
            thread.word = _Told(thread, _tell)
        elif _tell is None and isinstance(word, _Told):
            thread.word = word.word


class _Ended:
    """Goes with its thread, and takes the word away from whoever still holds what it had."""

    __slots__ = ("thread",)

    def __init__(self, thread: _Thread) -> None:
        self.thread = thread

    def __del__(self) -> None:
        self.thread.word = [0]


#: ``mine``: the thread's _Thread; ``ended``: what goes with it.
_here: Any = threading.local()


class scope:
    """``with gpumem.scope("name"): ...``, or ``@gpumem.scope("name")`` above a function.

    What the thread allocates inside is tagged ``outer/name``; scopes nest, and nest with those of the C API and of NVTX.
    ``name`` may hold ``/``. One object is for one thread at a time.

    Above a coroutine function, a generator function or an asynchronous one the scope is open while that very function runs,
    and closed while it waits. A ``with`` block around an ``await`` or a ``yield`` stays open meanwhile: what other
    coroutines of the thread allocate then has its name.
    """

    __slots__ = ("_name", "_here", "_outer", "_below")
    _outer: int
    _below: Optional["scope"]

    _name: str
    #: While it is open, what its thread has.
    _here: Optional[_Thread]

    if _TORCH is not None and _TORCH < (2, 5):
        # Its compiler took classes with an __init__ for no context managers. This costs 75 ns more.
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
            again = _Again(self._name)
            again.of = self
            return again.__enter__()
        word = here.word
        self._outer = outer = word[0]
        self._below = here.top
        self._here = here
        here.top = self
        try:
            word[0] = _tags[outer][self._name]
        except KeyError:
            word[0] = _intern(outer, self._name)
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
            here.word[0] = self._outer
            self._here = None
        else:
            _close(here, self)

    def __call__(self, function: _F) -> _F:
        import inspect  # 10 ms, for those that decorate

        name = self._name
        wrapped: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                return await _Steps(name, function(*args, **kwargs))

        elif inspect.isasyncgenfunction(function):

            async def wrapped(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                inner = function(*args, **kwargs)
                step, argument = inner.asend, None
                while True:
                    try:
                        item = await _Steps(name, step(argument))
                    except StopAsyncIteration:
                        return
                    try:
                        argument = yield item
                        step = inner.asend
                    except GeneratorExit:
                        await _Steps(name, inner.aclose())
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
    """``yield from inner`` with the scope open while ``inner`` runs."""
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


class _Steps:
    """An awaitable with the scope open while it runs."""

    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __await__(self) -> Generator[Any, Any, Any]:
        return _stepped(self._name, self._inner.__await__())


#: Nothing is recorded.
_NOWHERE = _Thread([0])


class _Again(scope):
    """A scope object that is entered while it is open."""

    __slots__ = ("of",)

    of: scope


def _close(here: _Thread, closed: scope) -> None:
    """A scope ends that is not the innermost one, or was entered again: the one above it goes back to what was outside of it."""
    above: Optional[scope] = None
    each = here.top
    while each is not None and each is not closed and getattr(each, "of", None) is not closed:
        above, each = each, each._below
    if each is None:
        return
    if above is None:
        here.top = each._below
        here.word[0] = each._outer
    else:
        above._below, above._outer = each._below, each._outer
    each._here = None


def _begin() -> Optional[_Thread]:
    """The first scope of this thread."""
    found = library()
    address = found.scope_word() if found is not None else None
    if not address:
        return None
    thread = _Thread(memoryview(ctypes.c_uint32.from_address(address)).cast("B").cast("I"))
    _threads.add(thread)
    if _tell is not None:
        thread.word = _Told(thread, _tell)
    _here.mine = thread
    _here.ended = _Ended(thread)
    return thread


def _intern(outer: int, name: str) -> int:
    """The tag of a name at a place, asked of the agent and kept."""
    global _kept
    found = library()
    if found is None or not found.available():
        return outer
    # An empty name opens nothing; 0: no room for it.
    tag = (found.intern(outer, text(name)) if name else 0) or outer
    _kept += 1
    if _kept > _MOST:
        _tags.clear()
        _kept = 1
    _tags.setdefault(outer, {})[name] = tag
    return tag


# Whether a scope does nothing: one of these at a time, so that it costs one call.


def _look() -> bool:
    """At first: is there an agent?"""
    if library() is not None:
        return _agent_found()
    global _skip
    _skip = _always
    return True


def _always() -> bool:
    """No agent."""
    return True


def _plain() -> bool:
    """An agent, and no torch so far."""
    return _torch_came() if "torch" in _modules else False


def _torch_came() -> bool:
    """In compiled code the first return is the only one."""
    asked = getattr(getattr(_modules["torch"], "compiler", None), "is_dynamo_compiling", None)
    if asked is not None:
        if asked():
            return True
        _settle(asked)
    return False


def _settle(asked: Callable[[], bool]) -> None:
    global _skip
    _skip = asked


def in_compiled_code() -> bool:
    """Whether Dynamo reads this: then nothing is said, and there is no graph break."""
    asked = getattr(getattr(_modules.get("torch"), "compiler", None), "is_dynamo_compiling", None)
    return asked is not None and bool(asked())


_calls = 0


def _forked() -> bool:
    """A child: its agent is silent until CUDA begins in it. Looks get rarer, as in gpumem.h."""
    global _calls
    _calls += 1
    if _calls & 1023 if _calls > 1024 else _calls & (_calls - 1):
        return True
    found = library()
    if found is None or not found.available():
        return True
    return _agent_found()


#: ``None``: an agent, and no torch that could come.
_skip: Optional[Callable[[], bool]] = _look


def _agent_found() -> bool:
    global _skip
    _skip = None if _TORCH is None and "torch" not in _modules else _plain
    return _skip is not None and _skip()


def _agent_came() -> None:
    if _skip is _always:
        _agent_found()


def _after_fork() -> None:
    global _skip, _calls
    _calls = 0
    if _skip is not _always:
        _skip = _forked


when_found.append(_agent_came)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
