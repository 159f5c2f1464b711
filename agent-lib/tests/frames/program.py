"""Compares the agent's reading of this thread's frames with the truth. Prints each failed check, and the number of checks.

    program.py libgpumem.so program.so folder-of-_frames.py [end]

With `end` only the last part: the interpreter ends while one of its threads still runs.
"""

import asyncio
import ctypes
import gc
import os
import random
import sys
import threading
import time
import weakref

sys.path.insert(0, sys.argv[3])
import _frames

agent = ctypes.CDLL(sys.argv[1])  # calls release the interpreter's lock
holding = ctypes.PyDLL(sys.argv[1])  # and these do not
program = ctypes.CDLL(sys.argv[2])
u64 = ctypes.c_uint64
for library in (agent, holding):
    library.gpumem_module.argtypes = [u64, u64, u64, ctypes.c_char_p]
    library.gpumem_module_gone.argtypes = [u64]
    library.gpumem_code.argtypes = [u64, ctypes.c_int]
    library.gpumem_here.argtypes = [ctypes.c_char_p, u64]
    library.gpumem_here.restype = u64
    library.gpumem_modules_unknown.restype = u64
    library.gpumem_code.restype = None

checks = 0
failed = []


def check(what, found, expected):
    global checks
    checks += 1
    if found != expected:
        failed.append(f"{what}: {found!r}, not {expected!r}")


def whole(library=agent):
    room = ctypes.create_string_buffer(1 << 14)
    length = library.gpumem_here(room, len(room))
    text = room.raw[:length].decode()
    return text.split("\n")


def here(library=agent):
    return whole(library)[0]


class Module:
    """Like torch's module: called through a method whose first variable is the module."""

    def __init__(self, **children):
        self.children = children

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, work, *args):
        return work(*args)

    def apply(self, work):
        for child in self.children.values():
            child.apply(work)
        return work()


class Derived(Module):
    pass


class Closed(Module):
    """Like older torch's module: the first variable is also used by an inner function."""

    def __call__(self, *args):
        def inner():
            return self.forward(*args)

        return inner()


class Plain:
    def __call__(self, work):
        return work()


def register(module, name, parent=0):
    agent.gpumem_module(id(module), id(type(module)), parent, name.encode())
    module.watched = weakref.ref(module, lambda _, address=id(module): agent.gpumem_module_gone(address))
    watched.append(module.watched)
    for child, inner in module.children.items():
        register(inner, child.lstrip("_"), id(module))
    return module


watched = []


def optimizer_step(work):
    return work()


def backward(work):
    return work()


def boundary(work):
    return work()


check("unproved", here(), " unknown")
print("version", sys.version.split()[0])
codes = [
    (Module.__call__, _frames.MODULE),
    (Closed.__call__, _frames.MODULE),
    (Plain.__call__, _frames.MODULE),
    (optimizer_step, _frames.OPTIMIZER),
    (backward, _frames.BACKWARD),
    (Module.apply, _frames.SETUP),
    (boundary, _frames.BOUNDARY),
]
for function, what in codes:
    agent.gpumem_code(id(function.__code__), _frames.meaning(function.__code__, what))
check("not proved", here(), " unknown")
reason = _frames.prove(agent)
print("reason", reason)
if reason:
    sys.exit(3)
check("proved with the lock held", _frames.prove(holding), "")

attention, linear = Module(), Module()
blocks = [Module(attn=Module(c_proj=Module())) for _ in range(12)]
blocks[3] = Module(attn=attention)
attention.children["c_proj"] = linear
stack = Module(**{f"_{n}": block for n, block in enumerate(blocks)})
model = register(Module(h=stack, head=Module()), "GPT")
PATH = "GPT/h.3/attn/c_proj"


def nested(work):
    return model(stack, blocks[3], attention, linear, work)


def deep(depth, work):
    return work() if depth == 0 else deep(depth - 1, work)


class Late:
    """Destroyed after the interpreter has deleted the states of other threads, when frames are no longer read."""

    def __init__(self, last):
        self.last = last

    def __del__(self, write=os.write, now=time.monotonic, unnamed=len(" unknown\n")):
        deadline = now() + 20
        while self.last.value != unnamed and now() < deadline:
            pass
        write(1, b"silent\n" if self.last.value == unnamed else b"still reading\n")


def ends():
    """The interpreter is about to end while one thread still runs without the GIL, deep in frames."""
    program.work.argtypes = [ctypes.c_void_p]
    calls = u64.in_dll(program, "calls")
    function = ctypes.cast(agent.gpumem_here, ctypes.c_void_p)
    work = lambda: nested(lambda: deep(30, lambda: program.work(function)))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while calls.value < 200:
        assert thread.is_alive()
    sys.modules["late"] = Late(u64.in_dll(program, "last"))
    print("ends", flush=True)


if "end" in sys.argv[4:]:
    ends()
    sys.exit(0)
check("no module", here(), " unknown")
check("root", model(here), "GPT forward")
check("nested", nested(here), PATH + " forward")
check("with the lock held", nested(lambda: here(holding)), PATH + " forward")
check("a number alone", stack(blocks[11], here), "GPT/h.11 forward")
check("sibling", model(model.children["head"], here), "GPT/head forward")

# A compiler's module gives no name: the name is that of its calling module, if there is one.
generated, inside = Module(), Module()
register(generated, "GraphModule", id(generated))
register(inside, "graph", id(inside))
check("generated, called", nested(lambda: generated(here)), PATH + " forward")
check("generated, in each other", nested(lambda: generated(lambda: inside(here))), PATH + " forward")
check("generated, alone", generated(here), "GraphModule forward")
check("generated, in each other alone", generated(lambda: inside(here)), "GraphModule forward")
check("generated, in a step", optimizer_step(lambda: generated(here)), " optimizer")
check("generated, beyond a boundary", nested(lambda: boundary(lambda: generated(here))), " unknown")

# Phases.
check("optimizer", optimizer_step(here), " optimizer")
check("backward", backward(here), " backward")
check("a closure", optimizer_step(lambda: nested(here)), PATH + " forward")
check("optimizer inside", nested(lambda: optimizer_step(here)), " optimizer")
check("boundary", nested(lambda: boundary(here)), " unknown")
check("setup", linear.apply(here), PATH + " setup")
said = []
model.apply(lambda: said.append(here()))
check("setup of all", (said[0], said[-1], len(said)), ("GPT/h.0/attn/c_proj setup", "GPT setup", 39))
check("taken back", None, agent.gpumem_code(id(boundary.__code__), 0))
check("no boundary", nested(lambda: boundary(here)), PATH + " forward")

# Ways to be called.


def generator(work):
    yield work()
    yield work()


def through_generator():
    running = generator(here)
    found = [linear(lambda: next(running)), attention(lambda: next(running))]
    return found + list(generator(lambda: nested(here)))[:1]


check("generator", through_generator(), [PATH + " forward", "GPT/h.3/attn forward", PATH + " forward"])
resumed = (linear(here) for _ in range(2))
check("generator expression", [model(next, resumed), next(resumed)], [PATH + " forward"] * 2)


async def coroutine(work):
    await asyncio.sleep(0)
    found = work()
    await asyncio.sleep(0)
    return found


async def several():
    return await asyncio.gather(
        coroutine(lambda: nested(here)), coroutine(here), coroutine(lambda: blocks[5](here))
    )


check("coroutines", asyncio.run(several()), [PATH + " forward", " unknown", "GPT/h.5 forward"])


class Asynchronous(Module):
    async def __call__(self, work):
        await asyncio.sleep(0)
        return work()


code = Asynchronous.__call__.__code__
agent.gpumem_code(id(code), _frames.meaning(code, _frames.MODULE))
served = register(Asynchronous(), "Served")
check("a module that is a coroutine", asyncio.run(served(here)), "Served forward")


async def agen():
    yield linear(here)


async def first():
    async for found in agen():
        return found


check("asynchronous generator", asyncio.run(first()), PATH + " forward")


def decorate(function):
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        finally:
            pass

    return wrapper


check("decorator", nested(decorate(decorate(here))), PATH + " forward")
check("comprehension", nested(lambda: [here() for _ in range(1)]), [PATH + " forward"])
check("exec", nested(lambda: eval("here()")), PATH + " forward")
check("through C", nested(lambda: list(map(lambda _: here(), [1]))), [PATH + " forward"])
check("sorted", nested(lambda: sorted([1], key=lambda _: said.append(here()) or 0) and said[-1]), PATH + " forward")


for depth in (1, 10, 60):
    check(f"depth {depth}", deep(depth, lambda: nested(lambda: deep(depth, here))), PATH + " forward")
check("too deep", nested(lambda: deep(200, here)), " unknown")
check("modules above a long way", deep(200, lambda: nested(here)), PATH + " forward")


def fails(kind):
    raise kind


def caught(kind):
    try:
        nested(lambda: deep(20, lambda: fails(kind)))
    except Exception:
        return here(), nested(here)
    return None


check("exceptions", caught(ValueError("x")), (" unknown", PATH + " forward"))
try:
    nested(lambda: fails(KeyError("y")))
except KeyError:
    check("in a handler", linear(here), PATH + " forward")


class Manager:
    def __enter__(self):
        return linear(here)

    def __exit__(self, *_):
        self.found = attention(here)
        return True


manager = Manager()
with manager as entered:
    fails(ValueError())
check("context", (entered, manager.found), (PATH + " forward", "GPT/h.3/attn forward"))


class Dying:
    def __del__(self):
        said.append(here())


def dies():
    cycle = Dying()
    cycle.itself = cycle
    del cycle
    gc.collect()


nested(dies)
check("in a finalizer", said[-1], PATH + " forward")
# While 3.11 takes a frame down, it is still the innermost one, and its first variable may have died before the others.
Module.__call__(register(Module(), "dying"), lambda *_: None, Dying())
check("in a finalizer of a frame that ends", said[-1] in (" forward", " unknown"), True)
closed = register(Closed(), "Closed")
check("a variable in a cell", closed(here), "Closed forward")


def late_del(self, work):
    del self
    return work()


agent.gpumem_code(id(late_del.__code__), 1)
check("a variable that is deleted", late_del(model, here), " forward")
check("not a module", [late_del(odd, here) for odd in (None, 3, "x", 10**30)], [" forward"] * 4)

# Threads.


def on_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


check("second thread", on_thread(lambda: nested(here)), [PATH + " forward"])
check("second thread without", nested(lambda: on_thread(here)), [" unknown"])

# Identity of modules.
before = agent.gpumem_modules_unknown()
stranger = Module()
check("a stranger", stranger(here), " forward")
check("a stranger in a module", nested(lambda: stranger(here)), PATH + " forward")
check("strangers are counted", agent.gpumem_modules_unknown() - before, 2)
agent.gpumem_module(id(stranger), id(type(stranger)), id(model), b"late")
check("no longer", stranger(here), "GPT/late forward")
register(stranger, "7", id(stack))
check("with another parent", nested(lambda: stranger(here)), "GPT/h.7 forward")
wrapped = register(Module(module=model), "DDP")
check("all below another root", nested(here), "DDP/module/h.3/attn/c_proj forward")
register(model, "GPT")
check("and again", nested(here), PATH + " forward")
linear.__class__ = Derived
check("another class, derived", linear(here), PATH + " forward")
linear.__class__ = Module
check("its own class", linear(here), PATH + " forward")
impostor = Plain()
agent.gpumem_module(id(impostor), id(Module), 0, b"impostor")
check("another object where a module was", impostor(here), " forward")
orphan, parent = Module(), Module()
agent.gpumem_module(id(orphan), id(Module), id(parent), b"child")
check("before its parent", orphan(here), "child forward")
agent.gpumem_module(id(parent), id(Module), 0, b"Parent")
check("after its parent", orphan(here), "Parent/child forward")
agent.gpumem_module_gone(id(parent))
register(Module(), "other")
check("its parent is gone", orphan(here), "Parent/child forward")
a, b = Module(), Module()
agent.gpumem_module(id(a), id(Module), id(b), b"a")
agent.gpumem_module(id(b), id(Module), id(a), b"b")
check("a cycle ends", a(here).endswith("b/a forward"), True)


def churn():
    reused = 0
    addresses = set()
    for round in range(1000):
        one = register(Module(inner=Module()), f"temporary{round}")
        inner = one.children["inner"]
        reused += id(one) in addresses
        addresses.add(id(one))
        if one(inner, here) != f"temporary{round}/inner forward":
            return f"round {round}: {one(inner, here)}"
        stranger = Plain() if round % 2 else Module()
        del one, inner
        watched.clear()
        # New objects at the addresses of the deleted ones.
        others = [Module() for _ in range(4)]
        for other in others:
            if other(here) != " forward":
                return f"round {round}: {other(here)}"
    return reused > 100 or f"only {reused} addresses came again"


kept, watched[:] = list(watched), []
check("ids that come again", churn(), True)
watched[:] = kept

# The stack as text.


def seen(frame):
    """Formats the stack as the agent does."""
    entries = []
    while frame is not None:
        code = frame.f_code
        name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
        file = code.co_filename if len(code.co_filename) <= 160 else "..." + code.co_filename[-160:]
        entries.append(f"{name} ({file}:{frame.f_lineno})")
        frame = frame.f_back
    return entries


def both():
    return whole()[2:-1], seen(sys._getframe())


for where, work in (("", both), (" deep", lambda: deep(40, both)), (" generator", lambda: list(generator(both))[1])):
    found, expected = nested(work)
    check("stack" + where, found, expected)
check("stack of a coroutine", *asyncio.run(coroutine(both)))


def odd_source():
    """Lines far apart, expressions over several lines, code without lines, a table longer than a page."""
    yield "def odd\u00e9(both):"
    for n in range(1500):
        yield f"    if both == {n}: x{n} = [y for y in ({n}, 'abc')]"
    yield from [""] * 300
    yield "    try:"
    yield "        with manager:"
    yield "            found = [(yield both()),"
    yield from [""] * 150
    yield "                     (yield (lambda: both"
    yield "                      ()"
    yield "                     )()),"
    yield "            ]"
    yield "            raise KeyError"
    yield "    finally:"
    yield "        yield both("
    yield "        )"


space = {"manager": manager}
for file in ("short.py", "/a" * 150 + "/long.py", "\u00e9.py", "\u5b57" * 200 + ".py", "\U00020000.py"):
    exec(compile("\n".join(odd_source()), file, "exec"), space)
    for turn, (found, expected) in enumerate(space["odd\u00e9"](both)):
        check(f"stack {turn} in {file[-8:]}", found, expected)
small = ctypes.create_string_buffer(40)
check("little room", agent.gpumem_here(small, len(small)) < 40, True)

# Random calls on several threads, while other threads read their frames.
stop = threading.Event()


def meddle():
    random.seed(7)
    while not stop.is_set():
        for frame in sys._current_frames().values():
            while frame is not None:
                frame.f_lineno, frame.f_locals, frame.f_back
                frame = frame.f_back
        gc.collect(random.randrange(3))


def drive(running):
    try:
        while True:
            running.send(None)
    except StopIteration as end:
        return end.value


def wander(seed):
    choice = random.Random(seed)
    wrong = []

    def step(depth, expected):
        if depth == 0:
            found = here()
            if found != expected:
                wrong.append((found, expected))
            return
        kind = choice.randrange(9)
        index = choice.randrange(12)
        if kind == 0:
            blocks[index](step, depth - 1, f"GPT/h.{index} forward")
        elif kind == 1:
            list(generator(lambda: step(depth - 1, expected)))
        elif kind == 2:
            drive(coroutine(lambda: step(depth - 1, expected)))
        elif kind == 3:
            try:
                step(depth - 1, expected)
                raise ValueError
            except ValueError:
                step(choice.randrange(depth), expected)
        elif kind == 4:
            optimizer_step(lambda: step(depth - 1, " optimizer"))
        elif kind == 5:
            backward(decorate(lambda: step(depth - 1, " backward")))
        elif kind == 6:
            temporary = register(Module(), "temporary")
            temporary(step, depth - 1, "temporary forward")
        elif kind == 7:
            [step(depth - 1, expected) for _ in range(2)]
        else:
            deep(choice.randrange(5), lambda: step(depth - 1, expected))

    for _ in range(20):
        step(7, " unknown")
    return wrong[:3]


meddling = threading.Thread(target=meddle)
meddling.start()
results = []
wanderers = [threading.Thread(target=lambda seed=seed: results.append(wander(seed))) for seed in range(4)]
for thread in wanderers:
    thread.start()
for thread in wanderers:
    thread.join()
stop.set()
meddling.join()
check("wandering", results, [[]] * 4)

# Frames are not read in a forked child.
child = os.fork()
if child == 0:
    os._exit(0 if nested(whole) == [""] else 1)
check("in a forked child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
check("in the parent", nested(here), PATH + " forward")

print("checks", checks)
for line in failed:
    print("failed", line)
if failed:
    sys.exit(1)

ends()
