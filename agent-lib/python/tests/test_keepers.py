"""Names that keep tensors when memory runs out; the tensors are objects of this file. tests/torch/keepers.py tests real ones.

python3 -m unittest discover -s agent-lib/python/tests"""

import ctypes
import functools
import gc
import pathlib
import sys
import threading
import time
import unittest
import weakref
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from gpumem.torch import _observer  # noqa: E402
from gpumem.torch._keepers import Held, find  # noqa: E402
from gpumem.torch._objects import Deadline, class_text, count_references, referenced  # noqa: E402


WITH_GIL = unittest.skipUnless(getattr(sys, "_is_gil_enabled", lambda: True)(), "without the GIL nothing is scanned")


class Tensor:
    """Stands for a tensor. Code that a scan must not run raises an error."""

    def __init__(self, size=1024, graph=False):
        self.held = Held(id(self), size, graph)

    def __getattr__(self, name):
        raise AssertionError("code of the program runs: " + name)

    __eq__ = __hash__ = None


class Derived(Tensor):
    """A class with tensors inside, such as a DTensor."""


class Store:
    def __init__(self, thing):
        self.thing = thing

    @property
    def broken(self):
        raise AssertionError("a property runs")

    def __eq__(self, other):
        raise AssertionError("a comparison runs")

    __hash__ = None


class WithSlots:
    __slots__ = ("things",)


class Hostile(dict):
    def __getitem__(self, key):
        raise AssertionError("code of a container runs")

    keys = values = items = __iter__ = __len__ = __contains__ = __getitem__


class Record:
    def __init__(self, loss):
        self.loss = loss


class Cyclic:
    pass


def tensors(count=40, **more):
    return [Tensor(**more) for _ in range(count)]


def all_tensors():
    found = [one for one in gc.get_objects() if type(one) is Tensor]
    return [(one, one.held) for one in found]


def rows(seconds=60.0):
    found = all_tensors()
    return find(found, (Derived,), Deadline(seconds, seconds))


def names(seconds=60.0):
    return [(row.name.kind, row.name.name, row.container, row.tensors) for row in rows(seconds)]


THINGS = None


class Names(unittest.TestCase):
    def tearDown(self):
        global THINGS
        THINGS = None
        gc.collect()

    def put(self, thing):
        global THINGS
        THINGS = thing

    def test_containers_of_a_global_variable_are_named(self):
        for kind in (list, tuple, deque):
            self.put(kind(tensors()))
            self.assertEqual(names(), [("global", "THINGS", kind.__name__, 40)])
        for kind in (dict, OrderedDict, Hostile):
            self.put(kind(enumerate(tensors())))
            self.assertEqual(names(), [("global", "THINGS", kind.__name__, 40)])
        self.put(defaultdict(list, {step: [one] for step, one in enumerate(tensors())}))
        self.assertEqual(names(), [("global", "THINGS", "defaultdict", 40)])
        self.put([(step, {"out": one}) for step, one in enumerate(tensors())])
        found = rows()
        self.assertEqual([(row.name.name, row.tensors, row.bytes) for row in found], [("THINGS", 40, 40 * 1024)])
        self.assertEqual(found[0].name.place, "test_keepers.py")
        self.assertFalse(found[0].is_partial or found[0].in_traceback)

    def test_attributes_slots_and_classes_are_named(self):
        self.put(Store(deque(tensors())))
        self.assertEqual(names(), [("attribute", "Store.thing", "deque", 40)])
        self.put(WithSlots())
        THINGS.things = tensors()
        self.assertEqual(names(), [("attribute", "WithSlots.things", "list", 40)])
        self.put(None)
        Cyclic.history = tensors()
        self.assertEqual(names(), [("attribute", "Cyclic.history", "list", 40)])
        del Cyclic.history

    def test_many_objects_belong_to_the_list_that_holds_them(self):
        self.put([Record(one) for one in tensors()])
        self.assertEqual(names(), [("global", "THINGS", "list", 40)])

    def test_closures_defaults_and_caches_are_named(self):
        def make():
            kept = tensors()
            return lambda: kept

        self.put(make())
        (row,) = rows()
        self.assertEqual((row.name.kind, row.name.name), ("closure", "kept"))
        self.assertTrue(row.name.place.startswith("test_keepers.py:"), row)

        def remember(one, memory=[]):  # noqa: B006
            memory.append(one)

        self.put(remember)
        for one in tensors():
            remember(one)
        del one
        (row,) = rows()
        self.assertEqual((row.name.kind, row.name.function.rpartition(".")[2]), ("default", "remember"))

    def test_cache_of_a_function_is_named(self):
        from functools import lru_cache

        @lru_cache(maxsize=None)
        def mask(size):
            return Tensor()

        self.put(mask)
        for size in range(40):
            mask(size)
        (row,) = rows()
        self.assertEqual((row.name.kind, row.tensors), ("cache", 40))
        self.assertEqual(row.name.function.rpartition(".")[2], "mask")

    def test_tracebacks_keep_local_variables(self):
        def fail():
            out = tensors(2)
            raise ValueError(len(out))

        errors = []
        for _ in range(20):
            try:
                fail()
            except ValueError as error:
                errors.append(error)
        self.put(errors)
        del errors
        (row,) = rows()
        self.assertEqual((row.name.name, row.tensors, row.in_traceback), ("THINGS", 40, True))

    def test_classes_derived_from_tensors_only_lead_to_names(self):
        wrapped = []
        for inner in tensors():
            outer = Derived.__new__(Derived)
            outer.__dict__["inner"] = inner
            wrapped.append(outer)
        self.put(wrapped)
        del wrapped, inner, outer
        self.assertEqual(names(), [("global", "THINGS", "list", 40)])

    def test_losses_with_graphs_are_reported_beside_larger_stores(self):
        self.put({"losses": Store(tensors(100, size=4, graph=True))})
        stores = [type("Store%d" % number, (Store,), {})(tensors(8)) for number in range(9)]
        Cyclic.stores = stores
        del stores
        found = rows()
        self.assertIn(("Store.thing", 100, 400), [(row.name.name, row.with_graph, row.bytes) for row in found])
        del Cyclic.stores

    def test_few_tensors_are_no_store(self):
        self.put({"image": Tensor(1 << 30), "mask": Tensor(1 << 30)})
        self.assertEqual(names(), [])

    def test_shared_storages_count_once(self):
        shared = Held(1, 4096, False)
        self.put(tensors(10))
        for one in THINGS:
            one.__dict__["held"] = shared
        del one
        (row,) = rows()
        self.assertEqual((row.tensors, row.bytes), (10, 4096))

    def test_names_are_cleaned_and_bounded(self):
        globals()["odd\tname\n\x1b" * 30] = tensors()
        (row,) = rows()
        del globals()["odd\tname\n\x1b" * 30]
        parts = row.line().split("\t")
        self.assertEqual((len(parts), len(parts[1])), (9, 120))
        self.assertTrue(row.line().isprintable() or "\t" in row.line())
        self.assertNotIn("\n", row.line())


class Attaching(unittest.TestCase):
    """The observer is attached once, and does not initialise CUDA."""

    def setUp(self):
        self.attached, self.is_initialized = [], False
        parts = SimpleNamespace(_cuda_attach_out_of_memory_observer=self.attached.append)
        cuda = SimpleNamespace(is_initialized=lambda: self.is_initialized, _queued_calls=[])
        self.torch = SimpleNamespace(_C=parts, cuda=cuda)
        for patch in (
            mock.patch.dict(sys.modules, torch=self.torch),
            mock.patch.object(_observer.functions, "keepers_wanted", lambda: 1, create=True),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def attach(self, keepers, times=3):
        for _ in range(times):
            keepers.attach(self.torch)
        return len(self.attached)

    def test_while_cuda_is_initialised(self):
        keepers = _observer.Keepers()
        self.assertEqual(self.attach(keepers), 0)
        ((call, _),) = self.torch.cuda._queued_calls
        call()
        self.assertEqual(self.attached, [keepers.on_failure])
        self.is_initialized = True
        self.assertEqual(self.attach(keepers), 1)

    def test_after_the_calls_of_the_initialisation(self):
        keepers = _observer.Keepers()
        self.attach(keepers)
        self.is_initialized = True
        self.assertEqual(self.attach(keepers), 1)
        self.torch.cuda._queued_calls[0][0]()
        self.assertEqual(len(self.attached), 1)

    def test_not_for_the_parent_of_a_forked_process(self):
        keepers = _observer.Keepers()
        self.attach(keepers)
        keepers.process += 1
        self.torch.cuda._queued_calls[0][0]()
        self.assertEqual(self.attached, [])

    def test_allocators_and_releases_without_observers(self):
        keepers = _observer.Keepers()
        self.is_initialized = True
        self.torch._C = SimpleNamespace()
        self.assertEqual(self.attach(keepers), 0)
        del self.torch._C
        self.assertEqual(self.attach(keepers), 0)

        def refuses(_):
            raise RuntimeError("no observers")

        self.torch._C = SimpleNamespace(_cuda_attach_out_of_memory_observer=refuses)
        self.assertEqual(self.attach(keepers), 0)


class Job:
    """Each refers to itself by a method."""

    def __init__(self, thing):
        self.thing = thing
        self.on_done = self.close

    def close(self):
        pass


class Cycles(unittest.TestCase):
    """Objects that only the garbage collector would free. It runs in none of these tests."""

    def setUp(self):
        gc.collect()
        gc.disable()

    def tearDown(self):
        global THINGS
        THINGS = None
        gc.enable()
        gc.collect()

    def cycles(self):
        """Returns the rows of cycles. What the collector then frees is what they hold."""
        found = [(row.name.name, row.tensors, row.bytes) for row in rows() if row.name.kind == "cycle"]
        before = len(all_tensors())
        gc.collect()
        self.assertEqual(before - len(all_tensors()), sum(tensors for _, tensors, _ in found))
        return found

    def test_objects_that_refer_to_themselves_are_named(self):
        for _ in range(40):
            Job(Tensor())
        self.assertEqual(self.cycles(), [("Job", 40, 40 * 1024)])
        one = Cyclic()
        one.me, one.kept = one, tensors()
        del one
        self.assertEqual(self.cycles(), [("Cyclic", 40, 40 * 1024)])

    def test_views_of_memory_that_lives_are_not_named(self):
        global THINGS
        THINGS = tensors()
        for data in THINGS:
            view = Tensor()
            view.held = data.held
            Job(view)
        del view, data
        self.assertEqual([row.name.kind for row in rows()], ["global"])

    def test_objects_that_refer_to_each_other_are_named(self):
        for _ in range(10):
            node, owner = Store(None), Record([Store(tensors(4))])
            node.thing, owner.node = owner, node
        del node, owner
        self.assertEqual(self.cycles(), [("Store", 40, 40 * 1024)])

    def test_exceptions_in_their_own_frames_are_named_after_the_function(self):
        def fail(kept):
            try:
                raise ValueError
            except ValueError as error:
                last = error
            return len(kept), last is None

        for _ in range(20):
            fail(tensors(2))
        ((name, *numbers),) = self.cycles()
        self.assertEqual((name.rpartition(".")[2], numbers), ("fail", [40, 40 * 1024]))

    def test_functions_that_call_themselves_are_named(self):
        def make(kept):
            def walk(depth):
                return walk(depth - 1) if depth else kept

            return walk(2)

        for _ in range(20):
            make(tensors(2))
        ((name, *numbers),) = self.cycles()
        self.assertEqual((name.rpartition(".")[2], numbers), ("walk", [40, 40 * 1024]))

    def test_only_garbage_counts(self):
        global THINGS
        THINGS = jobs = [Job(Tensor()) for _ in range(40)]
        shared = Tensor()
        for _ in range(4):
            Job([Tensor(), shared])
        self.assertEqual(self.cycles(), [("Job", 4, 4 * 1024)])
        self.assertEqual(names(), [("global", "THINGS", "list", 40)])
        THINGS = jobs[0]
        THINGS.others = jobs
        del jobs, shared
        self.assertEqual(self.cycles(), [])

    def test_part_of_the_objects_makes_up_no_garbage(self):
        """Whatever the search has not reached refers to the rest."""
        from gpumem.torch import _cycles

        global THINGS
        THINGS = Job([Store(Job(Tensor())) for _ in range(40)])
        for _ in range(40):
            Job(Tensor())
        most, counts = _cycles._MOST, []
        try:
            for _cycles._MOST in range(0, 2000, 100):
                found = [row for row in rows() if row.name.kind == "cycle"]
                counts.append(sum(row.tensors for row in found))
        finally:
            _cycles._MOST = most
        self.assertEqual((min(counts), max(counts)), (0, 40))
        self.assertEqual(self.cycles(), [("Job", 40, 40 * 1024)])

    def test_scan_keeps_no_cycle(self):
        gone = [weakref.ref(one) for one in (Job(Tensor()) for _ in range(8))]
        del gone[4:]
        rows()
        self.assertTrue(all(one() is not None for one in gone), "freed by the scan")
        self.assertEqual(self.cycles(), [("Job", 8, 8 * 1024)])
        self.assertTrue(all(one() is None for one in gone), "kept by the scan")


class Harmless(unittest.TestCase):
    def test_nothing_of_the_program_changes(self):
        global THINGS
        alive = [Store([(step, Record(one)) for step, one in enumerate(tensors())])]
        THINGS = alive[0]
        dead = Cyclic()
        dead.me, dead.kept = dead, tensors()
        gone = weakref.ref(dead)
        gc.collect()
        gc.disable()
        try:
            del dead
            watched = [THINGS, THINGS.thing, THINGS.thing[7], THINGS.thing[7][1].loss, Store, Record]
            counts = list(map(sys.getrefcount, watched))
            state = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
            rows()
            before = len(gc.get_objects())
            for _ in range(5):
                rows()
            self.assertLessEqual(len(gc.get_objects()), before + 5)
            self.assertEqual(list(map(sys.getrefcount, watched)), counts)
            self.assertEqual((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()), state)
            self.assertIsNotNone(gone(), "collected by the scan")
        finally:
            gc.enable()
            THINGS = None
        gc.collect()
        self.assertIsNone(gone(), "kept by the scan")

    def test_scan_ends_after_its_time(self):
        global THINGS
        THINGS = [[[[tensors()]]]]
        self.assertEqual(rows(seconds=-1.0), [])
        # Either of the two clocks ends it.
        self.assertEqual(find(all_tensors(), (Derived,), Deadline(-1.0, 60.0)), [])
        self.assertEqual(find(all_tensors(), (Derived,), Deadline(60.0, -1.0)), [])
        many = [[number] for number in range(1_000_000)]
        found = all_tensors()
        begun = time.thread_time()
        (row,) = find(found, (), Deadline(0.01, 60.0)) or [None]
        del many
        THINGS = None
        self.assertLess(time.thread_time() - begun, 5.0)
        self.assertIsNone(row)

    def test_time_that_others_use_does_not_count(self):
        deadline = Deadline(0.5, 60.0)
        time.sleep(0.6)
        self.assertFalse(deadline.is_over())

    def test_no_code_of_the_program_runs(self):
        global THINGS
        called = []

        class Kind(type):
            def __getattribute__(self, name):
                called.append("Kind." + name)
                return super().__getattribute__(name)

        class Proxy(metaclass=Kind):
            def __getattribute__(self, name):
                called.append("Proxy." + name)
                return super().__getattribute__(name)

        class Variables(dict):
            def items(self):
                called.append("Variables.items")
                return super().items()

        class Callable:
            def __call__(self, number):
                return tensors()

            def __getattr__(self, name):
                called.append("Callable." + name)
                raise AttributeError(name)

        proxy, store = Proxy(), Store(None)
        object.__setattr__(proxy, "kept", tensors())
        store.__dict__ = Variables(kept=tensors())
        function = Callable()
        function.__dict__["__name__"] = function.__dict__["__qualname__"] = "answer"
        cached = functools.lru_cache()(function)
        cached(1)
        THINGS = [proxy, store, cached]
        del proxy, store, function, cached
        called.clear()
        found = rows()
        self.assertEqual(called, [])
        self.assertGreaterEqual(len(found), 1)
        THINGS = None

    def scanned(self, scan):
        """Calls the observer, with this function in place of the scan. Returns whether it ran."""
        keepers, torch = _observer.Keepers(), sys.modules.get("torch")
        keepers._scan = scan
        sys.modules["torch"] = torch
        try:
            keepers.on_failure(0, 1, 2, 3)
        finally:
            if torch is None:
                del sys.modules["torch"]
        return keepers.left < _observer.SCANS

    @WITH_GIL
    def test_errors_of_signal_handlers_reach_the_program(self):
        def handler():
            raise TimeoutError("of the program")

        other = type(handler)(handler.__code__, {"__name__": "program", "TimeoutError": TimeoutError})
        with self.assertRaises(TimeoutError):
            self.scanned(lambda torch: other())
        self.assertTrue(gc.isenabled())

    @WITH_GIL
    def test_errors_of_the_scan_do_not_reach_the_program(self):
        def fails():
            raise RecursionError("of the scan")

        for module in ("gpumem.torch._keepers", "_gpumem_torch._keepers"):
            own = type(fails)(fails.__code__, {"__name__": module, "RecursionError": RecursionError})
            self.assertTrue(self.scanned(lambda torch, own=own: own()))

    def test_an_interrupt_while_threads_are_stopped_restores_the_interpreter(self):
        interval = sys.getswitchinterval()

        def interrupted():
            raise TimeoutError("of a signal handler")

        with mock.patch.object(_observer.time, "monotonic", interrupted), self.assertRaises(TimeoutError):
            with _observer._Alone():
                self.fail("entered")
        self.assertEqual((sys.getswitchinterval(), gc.isenabled()), (interval, True))

    def test_classes_without_a_module_have_no_name(self):
        kind = eval("type('Nameless', (), {})", {})
        self.assertEqual(class_text(kind, "__module__"), "")
        kind.__module__ = Hostile()
        self.assertEqual(class_text(kind, "__module__"), "")

    @WITH_GIL
    def test_no_other_thread_and_no_collection_runs_during_a_scan(self):
        count, ended, seen, interval = [0], threading.Event(), [], sys.getswitchinterval()

        def work():
            while not ended.is_set():
                count[0] += 1

        def scan(torch):
            before, collections = count[0], gc.get_stats()
            kept = [[number] for number in range(100_000)]
            end = time.monotonic() + 0.1
            while time.monotonic() < end:
                pass
            seen.append((before == count[0], collections == gc.get_stats(), len(kept)))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            self.assertTrue(self.scanned(scan))
        finally:
            ended.set()
            thread.join()
        self.assertEqual(seen, [(True, True, 100_000)])
        self.assertEqual((sys.getswitchinterval(), gc.isenabled()), (interval, True))

    def test_a_traced_program_is_not_scanned(self):
        sys.setprofile(lambda *_: None)
        try:
            self.assertFalse(self.scanned(lambda torch: None))
        finally:
            sys.setprofile(None)

    def test_references_are_counted_without_code_of_the_program(self):
        class Long(list):
            def __len__(self):
                raise RuntimeError

        kept = [Long(), [None] * 1_000_000]
        with_it = count_references()
        del kept
        self.assertGreaterEqual(with_it - count_references(), 900_000)

    def test_only_objects_of_the_program_count_as_references(self):
        """PyTorch's graphs keep tensors by references that the garbage collector does not see."""
        of_graph, of_list, found = Tensor(), [Tensor()], set()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(of_graph))
        address = id(of_graph)
        del of_graph
        try:
            found = referenced({address, id(of_list[0])})
        finally:
            ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))
        self.assertEqual(found, {id(of_list[0])})

    @WITH_GIL
    def test_failed_scans_stay_silent_and_few(self):
        calls = []
        keepers = _observer.Keepers()
        keepers._scan = lambda torch: calls.append(1) or _observer._values(None)
        sys.modules.setdefault("torch", None)
        for _ in range(10):
            keepers.on_failure(0, 1, 2, 3)
        if sys.modules["torch"] is None:
            del sys.modules["torch"]
        self.assertEqual(len(calls), _observer.SCANS)


if __name__ == "__main__":
    unittest.main()
