"""Tests the agent's Python part inside a program: names of modules and backward nodes, reported parameters, gradients and
states, and everything it must not disturb. Prints failures.
"""

import collections
import copy
import ctypes
import functools
import gc
import os
import pickle
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import torch
from said import path_of, say
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

PARAMETER, GRADIENT, STATE = 1, 2, 3
library = ctypes.CDLL(os.environ["CUDA_INJECTION64_PATH"])
TESTS = []


#: Without a GIL no frames are read.
READ = getattr(sys, "_is_gil_enabled", lambda: True)()


def test(function):
    TESTS.append(function)
    return function


def names(function):
    """Marks a test that needs frame reading."""
    return test(function) if READ else function


def here():
    """Returns the name and phase that an allocation has now."""
    text = ctypes.create_string_buffer(4096)
    library.gpumem_here(text, len(text))
    return text.value.decode().splitlines()[0]


def begun():
    package = sys.modules.get("_gpumem_torch")
    return getattr(getattr(package, "_core", None), "_core", None)


def until(what, condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Told:
    """Records calls to the agent while it is entered."""

    def __init__(self, name):
        self.functions, self.name, self.calls = sys.modules["_gpumem_torch"]._agent.functions, name, []

    def __enter__(self):
        real = self.real = getattr(self.functions, self.name)

        def spy(*arguments):
            self.calls.append(arguments)
            return real(*arguments)

        setattr(self.functions, self.name, spy)
        return self.calls

    def __exit__(self, *_):
        setattr(self.functions, self.name, self.real)


class Ask(torch.autograd.Function):
    """Records the names of its forward and its backward pass."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log.append(here())
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(here())
        return gradient * 1, None


class Leaf(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.log = []

    def forward(self, x):
        return Ask.apply(self.fc(x), self.log)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Leaf()
        self.rest = nn.Sequential(Leaf(), nn.Sequential(nn.ReLU(), Leaf()))

    def forward(self, x):
        return self.rest(self.first(x))

    def logs(self):
        return [self.first.log, self.rest[0].log, self.rest[1][1].log]


def ones(device="cuda"):
    return torch.ones(2, 4, device=device)


@test
def a_child_can_run_a_backward_pass_although_the_agent_has_looked_at_nodes():
    """Run first: in a process that has run a backward pass, PyTorch refuses one in forked children."""
    child = os.fork()
    if child == 0:
        try:
            net = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            os._exit(0 if net.weight.grad is not None else 3)
        finally:
            os._exit(4)
    assert os.waitpid(child, 0)[1] == 0


sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../agent-lib/python"))


@names
def modules_are_named_by_where_they_are():
    one, two = Net().cuda(), Net().cuda()
    for net, root in ((one, "Net"), (two, "Net#2")):
        net(ones()).sum().backward()
        paths = [f"{root}/first", f"{root}/rest.0", f"{root}/rest.1.1"]
        assert net.logs() == [[f"{path} forward", f"{path} backward"] for path in paths], net.logs()
    del one, net
    gc.collect()
    again = Net().cuda()
    again(ones())
    assert again.first.log == ["Net/first forward"], again.first.log


@names
def replicas_are_replicas():
    net = Net().cuda()
    parallel = nn.DataParallel(net, device_ids=[0, 1])
    for _ in range(2):
        net.first.log.clear()  # which the replicas share
        parallel(torch.ones(4, 4, device="cuda")).sum().backward()
        names = ["Net replica#2/first", "Net replica/first"]
        assert sorted(net.first.log) == sorted(f"{name} {phase}" for name in names for phase in ("forward", "backward")), net.first.log


@names
def copies_know_nothing_and_are_found():
    net = Net().cuda()
    twin, thawed = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    for other in (twin, thawed):
        assert set(other.__dict__) == set(Net().__dict__)

        def is_named():
            other.first.log.clear()
            other(ones())
            return other.first.log[0].startswith("Net#")

        until("a name for a copy", is_named)


@test
def a_wrapper_has_no_path_of_its_own():
    net = Net()
    wrapped = torch.compile(net, backend="eager")
    holder = nn.ModuleDict({"model": wrapped})
    modules = begun().modules
    path = lambda module: modules.path(modules.known[id(module)])
    assert path(net) == path(wrapped) == "ModuleDict/model", (path(net), path(wrapped))
    assert path(net.rest[1][1]) == "ModuleDict/model/rest.1.1"
    del holder


@names
def the_backward_pass_is_named_whatever_thread_runs_it():
    net = Net().cuda()
    leaf = net.first
    for reentrant in (True, False):
        leaf.log.clear()
        x = ones().requires_grad_()
        checkpoint(leaf, x, use_reentrant=reentrant).sum().backward()
        assert leaf.log[0] == "Net/first forward" and len(leaf.log) >= 2
        assert set(leaf.log[1:]) == {"Net/first backward"}, leaf.log
    leaf.log.clear()
    thread = threading.Thread(target=lambda: leaf(ones()).sum().backward())
    thread.start()
    thread.join()
    assert leaf.log == ["Net/first forward", "Net/first backward"], leaf.log
    leaf.log.clear()
    x = ones().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert leaf.log[0] == "Net/first forward" and set(leaf.log[1:]) == {"Net/first backward"}, leaf.log
    assert here() == " unknown"


class Twice(nn.Module):
    """Its operation is an autograd function of the program."""

    def forward(self, x):
        return Ask.apply(x, [])


@names
def the_gradient_of_an_in_place_activation_is_its_own():
    for kind in (nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.Hardswish, nn.ReLU6, nn.ELU):
        for before in (nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Twice())):
            net = nn.Sequential(before, kind(inplace=True), nn.LayerNorm(4)).cuda()
            root = begun().modules.path(begun().modules.known[id(net)])
            for size in ((2, 4), (2, 3, 4)):
                seen = []
                y = net[1](net[0](torch.ones(*size, device="cuda")))
                y.grad_fn.register_prehook(lambda _: seen.append(here()))
                net[2](y).sum().backward()
                assert seen == [f"{root}.1 backward"], (kind, before, size, seen)


@test
def operations_in_place_work_as_ever():
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    for _ in range(3):
        try:
            x.relu_()
        except RuntimeError as error:
            assert "leaf" in str(error)
        else:
            raise AssertionError("nothing was raised")
    for device in ("cuda", "cpu"):
        start = torch.ones(4, 4, device=device, requires_grad=True)
        rows = start.clone()
        rows[:2].mul_(2).add_(1)
        rows.sum().backward()
        assert start.grad.shape == start.shape
    assert start.grad[:, 0].tolist() == [2, 2, 1, 1]


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("boom")


@test
def exceptions_pass_through():
    for device in ("cuda", "cpu"):
        x = torch.zeros(3, device=device, requires_grad=True)
        for _ in range(3):
            try:
                Bad.apply(x).sum().backward()
            except ValueError as error:
                assert str(error) == "boom"
            else:
                raise AssertionError("nothing was raised")
        (x * 2).sum().backward()
        assert x.grad is not None and here() == " unknown"


@test
def a_scope_names_the_backward_pass():
    log, x = [], ones().requires_grad_()
    library.gpumem_push(b"scope")
    y = Ask.apply(x * 2, log)
    library.gpumem_pop()
    y.sum().backward()
    assert log == ["scope unknown", "scope backward"] and here() == " unknown", log


def paths(calls, role):
    return collections.Counter(path.decode() for _, _, path, its, _ in calls if its == role)


@test
def a_compiler_that_takes_the_hooks_of_optimizers_is_told_of():
    """PyTorch 2.2's compiler does so."""
    import torch._dynamo

    package, kind = sys.modules["_gpumem_torch"], torch.optim.SGD
    kind([nn.Parameter(ones())], 0.1)  # the first one has its class's steps wrapped
    assert not package._codes.is_unhooked()
    wrapped, here = kind.step, begun()
    missing = list(here.missing)
    try:
        kind.step = torch._dynamo.disable(wrapped)
        assert kind.step.hooked and not package._codes.is_unhooked(), "they are called as before"
        with Told("roles") as calls:
            kind.step = lambda self: None
            kind.step.hooked = True
            # A tick of the agent may be the first to see it, or run at the same time.
            until("the reason", lambda: package._core.tick() is None or any(b"compiler" in reason for _, reason in calls))
    finally:
        kind.step = wrapped
        here.missing[:] = missing
        package._core._say(here)


@test
def two_optimizers_tell_what_is_theirs():
    make, judge = Net().cuda(), Net().cuda()
    ours, theirs = torch.optim.Adam(make.parameters()), torch.optim.SGD(judge.parameters(), 0.1, momentum=0.9)
    with Told("retag") as calls, Told("auto_step") as steps, Told("phase") as phases:
        for _ in range(3):
            theirs.zero_grad()
            judge(make(ones()).detach()).sum().backward()
            theirs.step()
            ours.zero_grad()
            judge(make(ones())).sum().backward()
            ours.step()
    numbers = [number for (number,) in steps]
    assert len(numbers) <= 3 and numbers == sorted(numbers), numbers
    assert phases == [(4,), (2,)] * 6, phases
    for net in (make, judge):
        root = begun().modules.path(begun().modules.known[id(net)])
        wanted = len(list(net.parameters()))
        for role in (GRADIENT, STATE):
            found = {path for path in paths(calls, role) if path.startswith(root + "/")}
            assert len(found) == wanted, (role, root, found)
    moments = {id(p): len(s) for p, s in ours.state.items()}
    assert moments and begun().sweeper.found[STATE] >= 3 * 6


class Asking(torch.optim.SGD):
    """Records the names of its step, and of the modules that a closure calls in it."""

    def step(self, closure=None):
        self.log.append(here())
        with torch.enable_grad():
            closure()
        self.log.append(here())
        return super().step()


@names
def what_a_step_allocates_is_the_optimizers():
    net = Net().cuda()
    optimizer = Asking(net.parameters(), 0.1)
    optimizer.log = []
    inside = []

    def closure():
        net(ones()).sum().backward()
        inside.append(here())

    for _ in range(2):
        optimizer.step(closure)
        optimizer.step(functools.partial(closure))
    assert optimizer.log == ["Asking.step optimizer"] * 8, optimizer.log
    assert inside == [" between"] * 4, inside
    root = begun().modules.path(begun().modules.known[id(net)])
    for log in net.logs():
        assert all(name.startswith(root + "/") for name in log), log
    key = id(optimizer)
    with Told("module_gone") as gone:
        del optimizer
        gc.collect()
    assert (key,) in gone, gone


@test
def gradients_that_share_a_storage_have_a_common_name():
    net = Net().cuda()
    bucket = torch.zeros(1000, device="cuda")
    at = 0
    for parameter in net.parameters():
        parameter.grad = bucket[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    with Told("retag") as calls:
        begun().sweeper.sweep([], True)
    of_bucket = [call for call in calls if call[1] == bucket.untyped_storage().data_ptr()]
    root = begun().modules.path(begun().modules.known[id(net)])
    assert [(path.decode(), role) for _, _, path, role, _ in of_bucket] == [(root, GRADIENT)], of_bucket


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embedding.weight


@test
def a_model_that_takes_the_place_of_another_is_told():
    def place():
        net = Net().cuda()
        with Told("retag") as calls:
            begun().sweeper.sweep([], False)
        wanted = {p.untyped_storage().data_ptr() for p in net.parameters()}
        return wanted, {address for _, address, *_ in calls}

    first, told = place()
    assert first <= told
    gc.collect()
    second, told = place()
    assert second <= told, "at the same addresses" if first == second else "elsewhere"


def told_and_true(calls, net, role=PARAMETER):
    """Returns, by address, the reported names of a model's parameters, and those of `named_parameters`."""
    root = begun().modules.path(begun().modules.known[id(net)])
    true = {}
    for name, parameter in net.named_parameters():
        owner, _, own = name.rpartition(".")
        true[parameter.untyped_storage().data_ptr()] = f"{path_of(root, owner)}/{own}"
    return {address: path.decode() for _, address, path, its, _ in calls if its == role and address in true}, true


@test
def a_watched_model_has_a_name_for_each_parameter_whatever_was_done_to_it():
    import gpumem.torch

    net = nn.ModuleDict({"blocks": nn.ModuleList(Leaf() for _ in range(4)), "head": Leaf()}).cuda()
    gpumem.torch.watch(net)
    block = net["blocks"][0]
    del net["blocks"][0]
    net["blocks"].insert(2, Leaf().cuda())
    net["blocks"].append(block)
    net["tail"] = nn.Sequential(nn.ReLU(), net.pop("head"))
    with Told("retag") as calls:
        gpumem.torch.watch(net)
    told, true = told_and_true(calls, net)
    assert told == true and len(set(told.values())) == len(true) == 12, (told, true)


@names
def a_layer_that_is_wrapped_has_its_new_path_at_once():
    net = Net().cuda()
    net(ones())
    inner = net.first
    net.first = nn.Sequential(nn.ReLU(), inner)
    inner(ones())
    net.first = inner
    inner(ones())
    root = begun().modules.path(begun().modules.known[id(net)])
    assert inner.log == [f"{root}/first forward", f"{root}/first.1 forward", f"{root}/first forward"], inner.log


@test
def methods_of_containers_look_and_fail_as_ever():
    blocks = nn.ModuleList([nn.Linear(2, 2)])
    for kind, name in ((nn.ModuleList, "insert"), (nn.Sequential, "__delitem__"), (nn.ModuleDict, "clear")):
        assert type(getattr(kind, name)).__name__ == "function", (kind, name)
    try:
        del blocks[5]
    except IndexError as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        assert len(files) > 1 and all(file.endswith("container.py") for file in files[1:]), files
    else:
        raise AssertionError("there is no such block")


@test
def a_slice_of_a_list_is_no_change():
    """Models of transformers take one in each forward pass."""
    net = nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(4)).cuda())
    core = begun()
    core.modules.follow(True)
    core.modules.due, version, before = float("inf"), core.modules.version, core.modules.known[id(net[0][1])].place()
    assert len([*net[0][1:3]]) == 2
    assert (core.modules.due, core.modules.version) == (float("inf"), version)
    assert core.modules.known[id(net[0][1])].place() == before
    core.modules.due = 0.0


@test
def a_new_model_is_told_although_no_sweep_is_due():
    net = Net().cuda()
    sweeper = begun().sweeper
    sweeper.due = time.perf_counter() + 60
    with Told("retag") as calls:
        sys.modules["_gpumem_torch"]._core.tick()
    sweeper.due = 0.0
    told, true = told_and_true(calls, net)
    assert told == true, (told, true)


@test
def a_state_that_was_loaded_is_told_with_the_next_step():
    net = Net().cuda()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(9):
        net(ones()).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with Told("retag") as calls:
        optimizer.step()
    states = lambda optimizer: {v.untyped_storage().data_ptr() for s in optimizer.state.values() for v in s.values() if v.is_cuda}
    told = {address for _, address, _, role, _ in calls if role == STATE}
    assert len(states(optimizer)) >= 12 and states(optimizer) <= told, (states(optimizer), told)
    # The state of one parameter changes.
    first = next(iter(optimizer.state))
    optimizer.state[first] = {name: value.clone() for name, value in optimizer.state[first].items()}
    begun().modules.due = 0.0
    with Told("retag") as calls:
        optimizer.step()
    told = {address for _, address, _, role, _ in calls if role == STATE}
    assert {v.untyped_storage().data_ptr() for v in optimizer.state[first].values() if v.is_cuda} <= told, told
    # Also without a step: the optimizer is found because it loads its state.
    saved = {name: copy.deepcopy(value) for name, value in optimizer.state_dict().items()}
    for state in saved["state"].values():
        state.update({name: value.cpu() for name, value in state.items()})
    other = torch.optim.Adam(Net().cuda().parameters())
    begun().modules.searched_at = 0.0  # searches were made for other tests
    with Told("retag") as calls:
        other.load_state_dict(saved)
        until("the state", lambda: states(other) <= {address for _, address, _, role, _ in calls if role == STATE})


@names
def a_program_names_its_model():
    import gpumem.torch

    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Told("retag") as calls:
        assert gpumem.torch.watch(net, optimizer, name="student") is None
    assert {path for path in paths(calls, PARAMETER) if path.startswith("student/")} == {
        "student/" + name for name in ("first/fc/weight", "first/fc/bias", "rest.0/fc/weight", "rest.0/fc/bias")
    } | {"student/rest.1.1/fc/weight", "student/rest.1.1/fc/bias"}
    net(ones()).sum().backward()
    assert net.first.log == ["student/first forward", "student/first backward"], net.first.log
    assert sys.modules["_gpumem_torch"] is not gpumem.torch, "the agent's own was there before"
    gpumem.torch.unwatch(net)
    net.first.log.clear()
    net(ones())
    begun().modules.search()
    net(ones())
    assert net.first.log == [" forward", " forward"], net.first.log
    gpumem.torch.watch(net)
    net(ones())
    assert net.first.log[2:] == ["Net/first forward"], net.first.log
    gpumem.torch.watch(object())
    gpumem.torch.watch(None, None)


@test
def only_memory_on_a_device_is_told_and_once():
    from torch._subclasses import FakeTensorMode

    begun().sweeper.sweep([], False)
    with Told("retag") as calls:
        with FakeTensorMode():
            fakes = [Tied(), nn.Linear(2, 2, device="cuda")]
        fakes.append(nn.Linear(3, 3, device="meta"))
        fakes.append(nn.LazyLinear(3))
        tied = Tied().cuda()
        begun().sweeper.sweep([], True)
    assert [path.decode().split("/")[1:] for _, _, path, *_ in calls] == [["embedding", "weight"]], calls
    del tied, fakes


class Odd(nn.Module):
    """Everything that a program may do to a module."""

    __slots__ = ("more",)
    __hash__ = None

    def __getattr__(self, name):
        if name.startswith("_"):
            return super().__getattr__(name)
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __bool__(self):
        raise RuntimeError("asked")

    def __len__(self):
        raise RuntimeError("measured")


class Unknown(nn.Module):
    def __init__(self):  # no super().__init__()
        pass


@test
def odd_modules_do_no_harm():
    odd, hollow = Odd(), Unknown.__new__(Unknown)
    odd.part = nn.Linear(2, 2)
    begun().modules.search()
    begun().sweeper.sweep([], True)
    known = begun().modules.known
    assert id(odd) in known and begun().modules.path(known[id(odd.__dict__["_modules"]["part"])]) == "Odd/part"
    loop = nn.Sequential()
    loop.inner = nn.Sequential()
    loop.inner._modules["outer"] = loop
    begun().modules.search()
    begun().sweeper.sweep([], True)
    del loop.inner._modules["outer"], hollow


@test
def a_program_that_records_what_it_computes_is_left_alone():
    from torch._subclasses import FakeTensorMode
    from torch.func import vmap

    core = sys.modules["_gpumem_torch"]._core
    assert core._is_quiet(torch)
    with FakeTensorMode():
        assert not core._is_quiet(torch)
    seen = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), named=None):
            seen.append(function)
            return function(*arguments, **(named or {}))

    with torch.device("meta"), Seeing():  # set_default_device is such a mode, and stays
        assert core._is_quiet(torch) and core._calibrate(torch)
    assert not seen, seen
    vmap(lambda x: (seen.append(core._is_quiet(torch)), x)[1])(torch.ones(2))
    assert seen == [False]
    torch.jit.trace(lambda x: (seen.append(core._is_quiet(torch)), x + 1)[1], torch.ones(2), check_trace=False)
    assert not any(seen), seen
    for mode in (torch.inference_mode(), torch.no_grad(), torch.autocast("cuda")):
        with mode:
            assert core._calibrate(torch)


@test
def functorch_is_not_asked():
    """A query of functorch creates a state of the thread, which every later backward node would copy."""

    class Watched:
        def __getattr__(self, name):
            assert name != "_functorch"
            return getattr(torch._C, name)

    core = sys.modules["_gpumem_torch"]._core
    assert core._is_quiet(SimpleNamespace(_C=Watched(), _guards=torch._guards))


@test
def nothing_is_compiled_differently():
    import torch._dynamo as dynamo

    counters = dynamo.utils.counters

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    def train(whole):
        dynamo.reset()
        counters.clear()
        net = Plain().cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        run = torch.compile(net, backend="aot_eager", fullgraph=True)
        step = torch.compile(optimizer.step, backend="eager") if whole else optimizer.step
        for _ in range(4):
            run(ones()).sum().backward()
            step()
            optimizer.zero_grad()
        # CPython 3.14: with any hook before steps, a graph that ends inside a step is compiled anew and not resumed.
        # Only its name differs.
        ends = collections.Counter(counters["graph_break"]) + collections.Counter(counters["unimplemented"])
        return dict(ends), dict(counters["stats"]), dict(counters["recompiles"])

    with_hooks = [train(whole) for whole in (False, True)]
    ends, stats, _ = with_hooks[0]
    assert ends == {} and stats["unique_graphs"] == 1, with_hooks[0]
    core = begun()
    for handle in core.handles:
        handle.remove()
    without = [train(whole) for whole in (False, True)]
    core.handles.clear()
    sys.modules["_gpumem_torch"]._core._register(torch, core)
    assert with_hooks == without, (with_hooks, without)


@test
def a_compiler_does_not_see_us():
    """Dynamo sees every function that runs while a model's code is outside of a graph."""
    import torch._dynamo.types

    dynamo, seen = torch._C._dynamo.eval_frame, set()
    answer = getattr(torch._dynamo.types, "ConvertFrameReturn", lambda: None)

    def callback(frame, *_):
        seen.add((frame.f_code.co_filename, frame.f_code.co_name))
        return answer()

    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.more = nn.Linear(2, 2), nn.Sequential(nn.ReLU())

    core = begun()
    before = dynamo.set_eval_frame(callback)
    try:
        model = Fresh()
        core.modules.search()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.part(torch.zeros(2, 2)).sum().backward()
        optimizer.step()
        core.sweeper.sweep([optimizer], True)
        sys.modules["_gpumem_torch"]._core.tick()
        del model, optimizer
        gc.collect()
    finally:
        dynamo.set_eval_frame(before)
    assert ("__init__" in {name for _, name in seen}), seen
    # The agent's code has no file. A program's imported package is in a folder, whose name other folders may share.
    package = os.path.dirname(getattr(sys.modules.get("gpumem"), "__file__", None) or "/nonexistent/")
    ours = {name for file, name in seen if file.startswith("<gpumem") or os.path.dirname(os.path.abspath(file)).startswith(package)}
    assert not ours, ours


@test
def workers_of_a_data_loader_do_nothing():
    assert sum(int(batch.sum()) for batch in DataLoader(list(range(64)), batch_size=8, num_workers=2)) == 2016


@names
def a_sharded_model_is_told_by_its_local_tensors():
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return say(left_out="FSDP2: not in this PyTorch")
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh

    port = 20000 + os.getpid() % 20000
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    distributed.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cuda", (1,))
        net = Net().cuda()
        for leaf in (net.first, net.rest[0]):
            fully_shard(leaf, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.Adam(net.parameters())
        with Told("retag") as calls:
            for _ in range(2):
                optimizer.zero_grad()
                net(ones()).sum().backward()
                optimizer.step()
        assert net.first.log[:2] == ["Net/first forward", "Net/first backward"], net.first.log
        layers = {f"Net/{part}/fc" for part in ("first", "rest.0", "rest.1.1")}
        wanted = {f"{layer}/{kind}" for layer in layers for kind in ("weight", "bias")}
        # The gradients of a group share one storage.
        for role, wanted in ((PARAMETER, wanted), (GRADIENT, layers), (STATE, wanted)):
            found = {path for path in paths(calls, role) if path.startswith("Net/")}
            assert found == wanted, (role, found)
        local = net.first.fc.weight._local_tensor.untyped_storage().data_ptr()
        assert local in {address for _, address, *_ in calls}
    finally:
        distributed.destroy_process_group()


def main():
    torch.empty(10, device="cuda")
    until("the agent's Python", lambda: begun() is not None and begun().calibrated is not None)
    core = begun()
    say(version=torch.__version__, frames=core.tested, nodes=core.calibrated, missing=core.missing)
    failed = 0
    for function in TESTS:
        try:
            function()
            gc.collect()
        except Exception:
            failed += 1
            say(failed=function.__name__, why=traceback.format_exc())
    start = time.perf_counter()
    for _ in range(20):
        core.sweeper.sweep(core.steps.optimizers(), True)
    say(sweep_us=round((time.perf_counter() - start) / 20 * 1e6), of=core.sweeper.found)
    assert core.tested == READ and core.calibrated and not core.missing
    say(done=not failed, tests=len(TESTS), failed=failed)


if __name__ == "__main__":
    main()
