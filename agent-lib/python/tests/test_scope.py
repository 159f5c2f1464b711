"""scope() with a fake library: one word for each thread, and tags that are numbers of paths."""

import asyncio
import contextlib
import ctypes
import gc
import os
import pathlib
import sys
import threading
import unittest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PACKAGE))

import gpumem  # noqa: E402
from gpumem import _library, _scope  # noqa: E402


class FakeLibrary:
    """The functions of the agent that scopes use."""

    missing = ()

    def __init__(self):
        self.words = {}
        self.paths = {0: ""}
        self.asked = 0
        self.recording = True

    def available(self):
        return int(self.recording)

    def scope_word(self):
        if not self.recording:
            return None
        word = self.words.setdefault(threading.get_ident(), ctypes.c_uint32(0))
        return ctypes.addressof(word)

    def intern(self, parent, name):
        self.asked += 1
        if not self.recording:
            return 0
        path = "/".join(filter(None, [self.paths[parent], name.decode()]))
        for tag, known in self.paths.items():
            if known == path:
                return tag
        tag = len(self.paths) + 100
        self.paths[tag] = path
        return tag

    def here(self):
        """Returns the current path of this thread."""
        word = self.words.get(threading.get_ident())
        return self.paths[word.value] if word is not None else None


class Case(unittest.TestCase):
    def setUp(self):
        self.before = _library._found, _scope._skip, _scope._here
        self.library = _library._found = FakeLibrary()
        _scope._tags.clear()
        _scope._here = threading.local()
        _scope._skip = _scope._find_agent
        self.here = self.library.here

    def tearDown(self):
        _library._found, _scope._skip, _scope._here = self.before
        _scope._tags.clear()


class Edges(Case):
    """Begin and end of scopes while they are recorded."""

    def setUp(self):
        super().setUp()
        self.told = []
        self.library.configure = lambda key, value: 1
        self.library.scope_edge = lambda begins: self.told.append(("<" if begins else ">") + self.here())
        self.addCleanup(lambda: _scope.record_edges(False))

    def test_each_scope_begins_and_ends_once(self):
        with gpumem.scope("before"):
            self.assertTrue(gpumem.configure("ranges", True))
            with gpumem.scope("a"), gpumem.scope(""):
                pass
            inner, outer = gpumem.scope("inner"), gpumem.scope("outer")
            with contextlib.suppress(KeyError), outer, inner:
                raise KeyError
        self.assertEqual(self.here(), "")
        began = ["<before/a", "<before/a", ">before/a", ">before/a"]
        both = ["<before/outer", "<before/outer/inner", ">before/outer/inner", ">before/outer"]
        self.assertEqual(self.told, began + both)
        gpumem.configure("ranges", False)
        with gpumem.scope("later"):
            self.assertEqual(self.here(), "later")
        self.assertEqual(len(self.told), 8)

    def test_scope_closed_out_of_order_ends_inner_scopes(self):
        gpumem.configure("ranges", "on")
        first, second = gpumem.scope("first"), gpumem.scope("second")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        self.assertEqual(self.here(), "first/second")
        second.__exit__(None, None, None)
        self.assertEqual((self.here(), self.told), ("", ["<first", "<first/second", ">first/second", ">first"]))

    def test_later_threads_report_edges(self):
        gpumem.configure("ranges", True)

        def work():
            with gpumem.scope("beside"):
                pass

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual(self.told, ["<beside", ">beside"])


class Nesting(Case):
    def test_paths_nest_and_are_restored(self):
        with gpumem.scope("a"):
            self.assertEqual(self.here(), "a")
            with gpumem.scope("b/c"):
                self.assertEqual(self.here(), "a/b/c")
            self.assertEqual(self.here(), "a")
            with gpumem.scope(""):
                self.assertEqual(self.here(), "a")
        self.assertEqual(self.here(), "")

    def test_scopes_of_other_libraries_are_restored(self):
        self.library.scope_word()
        word = self.library.words[threading.get_ident()]
        word.value = self.library.intern(0, b"by C")
        with gpumem.scope("a"):
            self.assertEqual(self.here(), "by C/a")
        self.assertEqual(self.here(), "by C")

    def test_exceptions_propagate_and_close_the_scope(self):
        with self.assertRaises(KeyError):
            with gpumem.scope("a"), gpumem.scope("b"):
                raise KeyError
        self.assertEqual(self.here(), "")

    def test_tag_is_interned_once_for_each_outer_tag(self):
        for _ in range(5):
            with gpumem.scope("a"), gpumem.scope("a"):
                self.assertEqual(self.here(), "a/a")
        self.assertEqual(self.library.asked, 2)

    def test_scope_object_is_reusable_and_reentrant(self):
        again = gpumem.scope("a")
        with again:
            with again:
                with again:
                    self.assertEqual(self.here(), "a/a/a")
                self.assertEqual(self.here(), "a/a")
            self.assertEqual(self.here(), "a")
        self.assertEqual(self.here(), "")
        with again:
            self.assertEqual(self.here(), "a")
        again.__exit__(None, None, None)
        self.assertEqual(self.here(), "")

    def test_names_of_any_kind(self):
        for name, path in [("ünï", "ünï"), ("cut\0here", "cut"), (7, "7"), ("\ud800", "?")]:
            with gpumem.scope(name):
                self.assertEqual(self.here(), path)

    def test_tag_cache_is_bounded(self):
        most, _scope._MOST = _scope._MOST, 10
        try:
            for number in range(35):
                with gpumem.scope("outer"), gpumem.scope(str(number)):
                    self.assertEqual(self.here(), "outer/{}".format(number))
            self.assertLess(sum(map(len, _scope._tags.values())), 15)
        finally:
            _scope._MOST = most

    def test_full_name_table_keeps_the_outer_tag(self):
        self.library.intern = lambda parent, name: 0
        with gpumem.scope("a"):
            self.assertEqual(self.here(), "")


class Functions(Case):
    def test_decorates_a_function(self):
        @gpumem.scope("f")
        def f(number, *, more):
            """Its text."""
            self.assertEqual(self.here(), "f/f" if number else "f")
            return number + more if number else f(1, more=more)

        self.assertEqual((f(0, more=2), self.here()), (3, ""))
        self.assertEqual((f.__name__, f.__doc__), ("f", "Its text."))

    def test_decorates_a_generator_while_it_runs(self):
        seen = []

        @gpumem.scope("g")
        def g():
            try:
                while True:
                    seen.append(self.here())
                    try:
                        seen.append((yield len(seen)))
                    except ValueError:
                        seen.append("caught in " + self.here())
            finally:
                seen.append("end in " + self.here())

        running = g()
        self.assertEqual(next(running), 1)
        with gpumem.scope("consumer"):
            self.assertEqual(running.send("x"), 3)
            self.assertEqual(self.here(), "consumer")
        running.throw(ValueError)
        self.assertEqual(self.here(), "")
        running.close()
        self.assertEqual(seen, ["g", "x", "consumer/g", "caught in g", "g", "end in g"])

    def test_generator_returns_its_result(self):
        @gpumem.scope("g")
        def g():
            got = yield 1
            return got * 2

        running = g()
        next(running)
        with self.assertRaises(StopIteration) as end:
            running.send(21)
        self.assertEqual(end.exception.value, 42)

    def test_decorates_coroutines_that_interleave(self):
        seen = []

        @gpumem.scope("task")
        async def task(name, turns):
            with gpumem.scope(name):
                seen.append(self.here())
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append(self.here())
            return name

        async def main():
            with gpumem.scope("main"):
                results = await asyncio.gather(task("a", 2), task("b", 3))
                self.assertEqual(self.here(), "main")
            return results

        self.assertEqual(asyncio.run(main()), ["a", "b"])
        self.assertEqual(seen[:2], ["main/task/a", "main/task/b"])
        self.assertEqual(set(seen[2:]), {"main/task"})
        self.assertEqual(self.here(), "")

    def test_decorates_asynchronous_generators(self):
        seen = []

        @gpumem.scope("ag")
        async def items():
            try:
                for number in range(3):
                    seen.append(self.here())
                    await asyncio.sleep(0)
                    yield number
            finally:
                seen.append("end in " + self.here())

        async def main():
            got = []
            async for number in items():
                self.assertEqual(self.here(), "")
                got.append(number)
            partial = items()
            await partial.__anext__()
            await partial.aclose()
            return got

        self.assertEqual(asyncio.run(main()), [0, 1, 2])
        self.assertEqual(seen, ["ag"] * 3 + ["end in ag", "ag", "end in ag"])


class OutOfOrder(Case):
    def test_generator_scope_closes_below_another(self):
        def g():
            with gpumem.scope("g"):
                yield

        running = g()
        next(running)
        with gpumem.scope("c"):
            self.assertEqual(self.here(), "g/c")
            next(running, None)
            self.assertEqual(self.here(), "g/c", "it keeps the path that it was opened with")
        self.assertEqual(self.here(), "", "restores the scope that is still open")

    def test_any_closing_order_restores_the_empty_path(self):
        import itertools

        for order in itertools.permutations(range(4)):
            scopes = [gpumem.scope(name) for name in "abcd"]
            for each in scopes:
                each.__enter__()
            for at in order:
                scopes[at].__exit__(None, None, None)
            self.assertEqual(self.here(), "", order)
            self.assertIsNone(_scope._here.mine.top)

    def test_coroutines_of_a_thread_share_its_word(self):
        """A with block around an await stays open while suspended, as documented, and leaves nothing behind."""
        seen = []

        async def task(name):
            with gpumem.scope(name):
                await asyncio.sleep(0)
                seen.append(self.here())

        async def main():
            await asyncio.gather(task("a"), task("b"))

        asyncio.run(main())
        self.assertEqual(seen, ["a/b", "a/b"])
        self.assertEqual(self.here(), "")

    def test_collected_generator_closes_its_scope(self):
        def g():
            with gpumem.scope("g"):
                yield

        running = g()
        next(running)
        self.assertEqual(self.here(), "g")
        del running
        gc.collect()
        self.assertEqual(self.here(), "")


class Threads(Case):
    def test_each_thread_has_its_own_path(self):
        ready, go = threading.Barrier(5), threading.Event()
        seen = {}

        def work(name):
            with gpumem.scope(name):
                ready.wait(10)
                go.wait(10)
                seen[name] = self.here()
            seen[name + " after"] = self.here()

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        ready.wait(10)
        self.assertIsNone(self.here())
        go.set()
        for thread in threads:
            thread.join()
        self.assertEqual(seen, {**{name: name for name in "abcd"}, **{name + " after": "" for name in "abcd"}})

    def test_word_of_an_ended_thread_is_not_written(self):
        held = []

        def work():
            def g():
                with gpumem.scope("g"):
                    yield

            held.append(g())
            next(held[0])
            held.append(self.library.words[threading.get_ident()])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        running, word = held
        word.value = 77  # the place is another thread's by now
        next(running, None)
        self.assertEqual(word.value, 77)
        self.assertIsNone(self.here())

    def test_generator_that_ends_on_another_thread(self):
        def g():
            with gpumem.scope("g"):
                yield

        running = g()
        next(running)
        self.assertEqual(self.here(), "g")
        thread = threading.Thread(target=lambda: next(running, None))
        thread.start()
        thread.join()
        self.assertEqual(self.here(), "", "of the thread that opened it")


class Absence(Case):
    def test_nothing_is_cached_without_an_agent(self):
        _library._found = None
        looked, _library._searched, _library._searched_path = _library._searched, True, os.environ.get(_library.PATH)
        try:
            with gpumem.scope("a") as a:
                self.assertIsNone(a._here)
            self.assertIs(_scope._skip, _scope._no_agent)
            self.assertFalse(hasattr(_scope._here, "mine"))
        finally:
            _library._searched = looked
        _library._found = self.library
        _scope._agent_appeared()
        with gpumem.scope("a"):
            self.assertEqual(self.here(), "a")

    def test_agent_that_does_not_record(self):
        self.library.recording = False
        with gpumem.scope("a") as a:
            self.assertIsNone(a._here)
        self.library.recording = True
        with gpumem.scope("a"):
            self.assertEqual(self.here(), "a")

    def test_agent_that_stops_recording_inside_a_scope(self):
        with gpumem.scope("a"):
            self.library.recording = False
            with gpumem.scope("b"):
                self.assertEqual(self.here(), "a")
        self.library.recording = True
        self.assertEqual(self.here(), "")
        with gpumem.scope("a"), gpumem.scope("b"):
            self.assertEqual(self.here(), "a/b", "no refusal was kept")

    def test_forked_child_does_nothing_until_its_agent_records(self):
        with gpumem.scope("parent"):
            self.library.recording = False
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with gpumem.scope("a") as a:
                        silent = a._here is None and self.here() == "parent"
                    self.library.recording = True
                    heard = False
                    for _ in range(2000):
                        with gpumem.scope("b"):
                            heard = heard or self.here() == "parent/b"
                    code = 0 if silent and heard and self.here() == "parent" else 2
                finally:
                    os._exit(code)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.library.recording = True
            with gpumem.scope("a"):
                self.assertEqual(self.here(), "parent/a", "the parent's goes on")


if __name__ == "__main__":
    unittest.main()
