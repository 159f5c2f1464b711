"""program.py LIBRARY WHAT: the agent's Python code with a stand-in for PyTorch. WHAT: names, unread, interrupt or end."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time

library = ctypes.CDLL(sys.argv[1])
what = sys.argv[2]


def here():
    text = ctypes.create_string_buffer(4096)
    library.gpumem_here(text, len(text))
    return text.value.decode().splitlines()[0]


def begun():
    package = sys.modules.get("_gpumem_torch")
    return getattr(getattr(package, "_core", None), "_core", None)


def until(what, condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)



import torch  # noqa: E402
from torch import nn  # noqa: E402


class Leaf(nn.Module):
    def __init__(self, address):
        super().__init__()
        self._parameters["weight"] = torch.nn.Parameter(address, requires_grad=True)

    def forward(self):
        self.node = torch.zeros(1) * 1.0
        return here()


class GraphModule(nn.Module):
    """A module as in torch.fx: each instance has a separate class."""

    def __new__(cls, *_):
        return object.__new__(type("Traced", (cls,), {}))

    def forward(self, work):
        return work()


GraphModule.__module__ = "torch.fx.graph_module"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Leaf(0x1000)
        self.second = Leaf(0x2000)

    def forward(self):
        return [self.first(), self.second()]


class Secretive:
    """A closure whose attributes cannot be read."""

    def __getattr__(self, name):
        raise ValueError(name)

    def __call__(self):
        pass


def names():
    early = Net()
    assert library.InitializeInjection() == 1
    until("our code", lambda: begun() is not None and begun().calibrated is not None)
    core = begun()
    assert core.tested and core.calibrated and not core.missing[1:], (core.tested, core.calibrated, core.missing)
    assert early() == ["Net/first forward", "Net/second forward"], early()
    late = Net()
    assert late() == ["Net#2/first forward", "Net#2/second forward"], late()
    assert early._apply(lambda _: here()) == "Net setup"
    optimizer = torch.optim.SGD([early.first._parameters["weight"]])
    seen = []
    optimizer.update = lambda: seen.append(here())
    optimizer.step(lambda: seen.append(here()))
    assert seen == [" between", "SGD.step optimizer"], seen
    assert here() == " unknown"
    assert core.sweeper.found == {1: 2}, core.sweeper.found  # both have theirs at the same addresses
    other = torch.optim.SGD([early.second._parameters["weight"]])
    looked = []
    core.steps.look, look = lambda optimizer: looked.append(optimizer), core.steps.look
    other.step(Secretive())
    assert looked == [other], looked
    core.steps.look = look
    looked.clear()
    del other
    known = len(core.modules.known)
    del early, late, optimizer
    gc.collect()
    assert len(core.modules.known) == known - 6, core.modules.known
    # A module made by a compiler has the name of the compiled module, and changes no other module's name.
    net, compiled = Net(), GraphModule()
    assert net._wrapped_call_impl.__func__.__code__ is compiled._wrapped_call_impl.__func__.__code__
    compiled.first = net.first
    compiled.wrapped = GraphModule()
    net.forward = lambda: [net.first(), compiled(here), compiled(lambda: compiled.wrapped(here))]
    assert net() == ["Net/first forward", "Net forward", "Net forward"], net()
    assert compiled(here) == "Traced forward", compiled(here)
    late = Leaf(0x3000)
    compiled.late = late
    assert late() == "Traced/late forward", late()
    net.late = late
    assert late() == "Net/late forward", late()
    net.traced = GraphModule()
    assert net.traced(here) == "Net/traced forward", net.traced(here)
    del net, compiled, late
    gc.collect()
    # Also on a thread other than the main one.
    found = []
    net = Net()
    thread = threading.Thread(target=lambda: found.extend(net()))
    thread.start()
    thread.join()
    assert found == ["Net/first forward", "Net/second forward"], found


def unread():
    """Without a GIL no frames are read; everything else works, and threads may start at the same time."""
    assert library.InitializeInjection() == 1
    until("our code", lambda: begun() is not None and begun().calibrated is not None)
    core = begun()
    assert not core.tested and core.calibrated and not core.missing[1:], (core.tested, core.calibrated, core.missing)
    kept = Net()
    optimizer = torch.optim.SGD([kept.first._parameters["weight"]])
    optimizer.step(lambda: None)
    assert core.sweeper.found == {1: 2}, core.sweeper.found
    found, seen = [], []

    def work():
        for _ in range(50):
            net = Net()
            found.extend(net())
            optimizer = torch.optim.SGD([net.first._parameters["weight"]])
            optimizer.step(lambda: seen.append(here()))
            found.append(here())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 600 and len(seen) == 200 and {*found, *seen} == {" unknown"}, {*found, *seen}
    assert kept() == [" unknown"] * 2
    del kept, optimizer

    def is_forgotten():
        gc.collect()
        return not core.modules.known

    until("all are forgotten", is_forgotten)


def interrupt():
    """Ctrl-C while the agent's code runs reaches the program."""
    from torch.nn.modules import module

    # A shell that runs this program in the background may have set SIGINT to be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    register, met = module.register_module_module_registration_hook, []

    def interrupted(hook):
        handle = register(hook)
        if len(met) < 3:
            met.append(threading.current_thread() is threading.main_thread())
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the handler runs between two statements
                pass
        return handle

    module.register_module_module_registration_hook = interrupted
    raised = 0
    while raised < 3:
        try:
            assert library.InitializeInjection() == 1
            until("an interrupt", lambda: False)
        except KeyboardInterrupt:
            raised += 1
            assert begun() is None
    until("our code", lambda: begun() is not None and begun().calibrated is not None)
    assert met == [True] * 3 and len(begun().handles) == 3 and len(module._hooks) <= 1 + 3, (met, module._hooks)


def end():
    """The interpreter ends while the agent's code is scheduled to run."""
    net = Net()
    assert library.InitializeInjection() == 1
    time.sleep(float(sys.argv[3]))
    net()


if __name__ == "__main__":
    {"names": names, "unread": unread, "interrupt": interrupt, "end": end}[what]()
    print("done")
