"""KV caches and parameter copies in the forms that programs use, with replicas of classes of transformers, timm and diffusers.

The argument selects the scenario; each prints `check` with bytes by role.

    caches.py generate    a cache that grows token by token, with gradients disabled
    caches.py engine      an engine allocates all of its cache at once, and one sets the role itself
    caches.py static      a cache allocated before the agent registered its class, and one allocated later
    caches.py tuples      a model's output has tuples of tensors
    caches.py trained     a cache in training: its tensors are kept for the backward pass
    caches.py idle        a program without optimizer that waits in one call of C, with its memory on the device
    caches.py copies      an average of a model, a target network, one that is trained later, frozen layers, a teacher
    caches.py inference   two models of one structure, none of them trained
"""

import copy
import ctypes
import gc
import os
import signal
import sys
import time
import types

import torch
from said import blocks, check, say, storage
from torch import nn

WIDTH = 256


def module(name):
    """An empty module of that name, as an import would leave it."""
    made = sys.modules[name] = types.ModuleType(name)
    return made


def transformers():
    """Classes as `transformers.cache_utils` has them."""
    within = {"__name__": "transformers.cache_utils", "torch": torch}
    source = '''
class CacheLayerMixin:
    def __init__(self):
        self.keys = self.values = None

class DynamicLayer(CacheLayerMixin):
    def lazy_initialization(self, keys):
        self.keys = torch.tensor([], dtype=keys.dtype, device=keys.device)
        self.values = torch.tensor([], dtype=keys.dtype, device=keys.device)

    def update(self, keys, values):
        if self.keys is None:
            self.lazy_initialization(keys)
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=-2)
        return self.keys, self.values

class StaticLayer(CacheLayerMixin):
    def lazy_initialization(self, keys):
        self.keys, self.values = torch.zeros_like(keys), torch.zeros_like(keys)

    def update(self, keys, values):
        if self.keys is None:
            self.lazy_initialization(keys)
        self.keys.copy_(keys)
        self.values.copy_(values)
        return self.keys, self.values

class Cache:
    def __init__(self, kind, layers):
        self.layers = [kind() for _ in range(layers)]

    def update(self, keys, values, layer):
        return self.layers[layer].update(keys, values)
'''
    made = module("transformers.cache_utils")
    exec(compile(source, "cache_utils.py", "exec"), within)
    made.__dict__.update(within)
    return made


class Layer(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.project = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, cache=None, number=0):
        keys, values = self.project(x).chunk(2, dim=-1)
        if cache is not None:
            keys, values = cache.update(keys, values, number)
        return self.out(torch.softmax(x @ keys.transpose(-1, -2), -1) @ values)


class Model(nn.Module):
    def __init__(self, layers=2, width=WIDTH):
        super().__init__()
        self.h = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x, cache=None):
        for number, layer in enumerate(self.h):
            x = x + layer(x, cache, number)
        return x


def core():
    package = sys.modules.get("_gpumem_torch")
    return getattr(getattr(package, "_core", None), "_core", None)


def until(what, condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def begun():
    torch.empty(10, device="cuda")
    until("the agent's Python", lambda: core() is not None and core().tested is not None)
    assert core().tested


def tell(name, roles):
    """`roles`: tensors by role. What else lives is not looked at."""
    live = blocks()
    sums = {}
    for role, tensors in roles.items():
        found = {storage(tensor) for tensor in tensors} - {0}
        sums[role] = sum(live[address] for address in found)
    check(name, roles=sums)


def held(cache):
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]


def token(length=1, **how):
    return torch.randn(1, length, WIDTH, device="cuda", **how)


def looked(after):
    """The agent has looked at everything since `after` complete looks."""
    until("a complete look", lambda: core().looks > after)


def generate():
    library = transformers()
    model = Model().cuda().eval()
    sys.modules["_gpumem_torch"]._codes.register_others()  # as the next tick does
    cache = library.Cache(library.DynamicLayer, 2)
    with torch.no_grad():
        model(token(16), cache)
        for number in range(3):
            model(token(), cache)
            tell(f"generate/{number}", {"kv_cache": held(cache)})


def engine():
    source = """
class GPUModelRunner:
    def _allocate_kv_cache_tensors(self, layers):
        return {f"layer.{number}": torch.zeros(1 << 20, dtype=torch.int8, device="cuda") for number in range(layers)}
"""
    within = {"__name__": "vllm.v1.worker.gpu_model_runner", "torch": torch}
    exec(source, within)
    module("vllm.v1.worker.gpu_model_runner").__dict__.update(within)
    sys.modules["_gpumem_torch"]._codes.register_others()
    kept = within["GPUModelRunner"]()._allocate_kv_cache_tensors(3)
    beside = torch.zeros(1 << 20, dtype=torch.int8, device="cuda")
    tell("engine/known", {"kv_cache": kept.values()})
    library = ctypes.CDLL(os.environ["CUDA_INJECTION64_PATH"])
    library.gpumem_retag(ctypes.c_uint64(0), ctypes.c_uint64(storage(beside)), None, 9, 0)
    tell("engine/said", {"kv_cache": [*kept.values(), beside]})


def static():
    library = transformers()
    model = Model().cuda().eval()
    cache = library.Cache(library.StaticLayer, 2)
    before = core().looks
    with torch.no_grad():
        model(token(64), cache)
        looked(before)
        tell("static/older", {"kv_cache": held(cache), "parameter": model.parameters()})
        other = library.Cache(library.StaticLayer, 2)
        model(token(64), other)
        tell("static/known", {"kv_cache": held(cache) + held(other), "parameter": model.parameters()})
        del other, cache
        gc.collect()
    tell("static/gone", {"kv_cache": [], "parameter": model.parameters()})


def tuples():
    source = "class ModelOutput(dict):\n    pass\n"
    within = {"__name__": "transformers.utils.generic"}
    exec(source, within)
    module("transformers.utils.generic").__dict__.update(within)
    model = Model().cuda().eval()
    before = core().looks
    with torch.no_grad():
        x = token(32)
        past = tuple(tuple(part.contiguous() for part in layer.project(x).chunk(2, -1)) for layer in model.h)
        output = within["ModelOutput"]()
        output.past_key_values = past
    looked(before)
    tell("tuples/all", {"kv_cache": [tensor for layer in past for tensor in layer], "parameter": model.parameters()})


def trained():
    library = transformers()
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(4):
        cache = library.Cache(library.DynamicLayer, 2)
        loss = model(token(16), cache).square().sum()
        if number == 3:
            core().sweeper.caches.search()
            core().sweeper.sweep([optimizer], False)
            loss.backward(retain_graph=True)
            tell("trained/3", {"activation": held(cache), "kv_cache": []})
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def idle():
    """Nothing but a call that releases the interpreter's lock: no statement is run meanwhile."""
    library = transformers()
    model = Model(4).cuda().eval()
    cache = library.Cache(library.StaticLayer, 4)
    with torch.no_grad():
        model(token(64), cache)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    libc = ctypes.CDLL(None)
    roles = {"kv_cache": held(cache), "parameter": model.parameters()}
    live = blocks()
    sums = {role: sum(live[storage(tensor)] for tensor in tensors) for role, tensors in roles.items()}
    say(waits=sums)
    while True:
        libc.pause()


class Agent(nn.Module):
    """A trained part and its target, and one that is trained later."""

    def __init__(self):
        super().__init__()
        self.critic, self.actor = Model(1, 128), Model(1, 64)
        self.target = copy.deepcopy(self.critic)


class ModelEmaV3(nn.Module):
    """As timm has it."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model).requires_grad_(False)


def step(models, optimizers, width):
    sum(model(torch.randn(1, 4, width, device="cuda")).square().sum() for model in models).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def copies():
    model = Model(3).cuda()
    for parameter in model.h[0].parameters():
        parameter.requires_grad_(False)  # a frozen layer, with the structure of its neighbours
    teacher = Model(4).cuda().requires_grad_(False)  # its layers are like those of the student
    average, wrapped = torch.optim.swa_utils.AveragedModel(model), ModelEmaV3(model)
    plain = copy.deepcopy(model)
    within = {"__name__": "diffusers.training_utils"}
    exec("class EMAModel:\n    def __init__(self, parameters):\n        self.shadow_params = [p.clone().detach() for p in parameters]\n", within)
    module("diffusers.training_utils").__dict__.update(within)
    sys.modules["_gpumem_torch"]._codes.register_others()
    shadow = within["EMAModel"](model.parameters()).shadow_params
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    agent = Agent().cuda()
    critic, actor = [torch.optim.SGD(part.parameters(), 0.01) for part in (agent.critic, agent.actor)]
    parameters = lambda *models: [parameter for one in models for parameter in one.parameters()]
    kinds = {"parameter": parameters(model, teacher, agent.critic, agent.actor), "parameter_copy": [*parameters(average, wrapped, plain, agent.target), *shadow]}
    for number in range(6):
        step([model], [optimizer], WIDTH)
        step([agent.critic], [critic], 128)
        step([agent.actor], [actor], 64)
        until("all modules are known", lambda: number < 4 or id(plain) in core().modules.known)
    core().sweeper.sweep(core().steps.optimizers(), False)
    tell("copies/all", kinds)
    # From now on it is an independent model, and stays one when its optimizer is gone.
    other = torch.optim.SGD(plain.parameters(), 0.01)
    for parameter in plain.parameters():
        parameter.requires_grad_(True)
    for number in range(3):
        step([plain], [other], WIDTH)
    step([model], [optimizer], WIDTH)
    del other
    gc.collect()
    core().sweeper.sweep(core().steps.optimizers(), False)
    tell("copies/trained", {"parameter": kinds["parameter"] + parameters(plain), "parameter_copy": [*parameters(average, wrapped, agent.target), *shadow]})


def inference():
    model = Model(2).cuda().eval()
    other, before = copy.deepcopy(model), core().looks
    with torch.no_grad():
        model(token(8))
        other(token(8))
    looked(before)
    tell("inference/all", {"parameter": [*model.parameters(), *other.parameters()], "parameter_copy": []})


begun()
for word in sys.argv[1:]:
    globals()[word]()
    gc.collect()
say(done=True)
