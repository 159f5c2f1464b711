"""Functions of PyTorch by which a frame tells what its thread is doing, or what memory is for: the agent knows them by the addresses
of their code.

Found by what there is, not by version: a name that a release lacks is left out.
"""

import sys
from functools import partial
from types import CodeType
from typing import Any, Dict, Iterator, List, Optional, Set

from . import _caches, _frames
from ._agent import functions
from ._frames import (
    BACKWARD,
    BOUNDARY,
    CACHE_UPDATE,
    COPYING,
    CUSTOM_FUNCTION,
    GRADIENT,
    KV_CACHE,
    MODULE,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    PARAMETER_COPY,
    REDUCTION,
    SETUP,
    STEP,
    ZERO_GRAD,
)

#: By address. Never freed: the agent compares addresses.
_kept: Dict[int, CodeType] = {}
#: Forward passes of custom functions that are told at most.
_MOST_CUSTOM = 1000


def _layers(thing: Any) -> Iterator[Any]:
    """A function and what its decorators are around, as far as they keep it; the innermost comes last."""
    for _ in range(9):
        yield thing
        thing = getattr(thing, "__wrapped__", None)
        if thing is None:
            return


def _own_code(thing: Any) -> Optional[CodeType]:
    code = getattr(getattr(thing, "__func__", thing), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _code(thing: Any) -> Optional[CodeType]:
    """Of a function, as it was written: decorators that keep the function are looked through."""
    *_, inner = _layers(thing)
    return _own_code(inner)


def tell(code: Optional[CodeType], what: int) -> bool:
    """The agent knows this code from now on."""
    if code is None or id(code) in _kept:
        return code is not None
    _kept[id(code)] = code
    try:
        meaning = _frames.meaning(code, what)
    except ValueError:  # a function, not a method: it has no module
        meaning = OPTIMIZER if what == STEP else what
    functions.code(id(code), meaning)
    return True


def _nested(code: Optional[CodeType], name: str) -> Iterator[CodeType]:
    """Functions called ``name`` that are written inside of one."""
    for constant in code.co_consts if code is not None else ():
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                yield constant
            yield from _nested(constant, name)


def _at(path: str) -> Any:
    """``package.module:name.name``, if the module is loaded and has it."""
    module, _, names = path.partition(":")
    thing = sys.modules.get(module)
    for name in names.split("."):
        thing = getattr(thing, name, None)
    return thing


_FSDP2 = ("fsdp._fully_shard", "_composable.fsdp")
_OTHERS = (
    ("torch:Tensor.backward", BACKWARD),
    ("torch.autograd:backward", BACKWARD),
    ("torch.autograd:grad", BACKWARD),
    ("torch.nn.modules.module:Module._apply", SETUP),
    ("torch.nn.modules.module:Module.load_state_dict", SETUP),
    ("torch.serialization:load", SETUP),
    # No hook shows a module that is copied.
    ("torch.nn.parameter:Parameter.__deepcopy__", COPYING),
    # What it keeps is the optimizer's. One that nobody has seen is searched for.
    ("torch.optim.optimizer:Optimizer.load_state_dict", STEP),
    # It moves one tensor of a state to its parameter's device. No step is under way: the phase alone would make it a temporary.
    ("torch.optim.optimizer:Optimizer._process_value_according_to_param_policy", OPTIMIZER_STATE),
    ("torch.optim.optimizer:Optimizer.zero_grad", ZERO_GRAD),
    ("torch.nn.modules.module:Module.zero_grad", ZERO_GRAD),
    ("torch.utils.data._utils.worker:_worker_loop", BOUNDARY),
    ("torch.utils.data._utils.pin_memory:_pin_memory_loop", BOUNDARY),
    # Buckets of gradients are made by what these call and is no Python; they are made anew in the second pass.
    ("torch.nn.parallel.distributed:DistributedDataParallel._ddp_init_helper", GRADIENT),
    ("torch.nn.parallel.distributed:DistributedDataParallel._pre_forward", GRADIENT),
) + tuple(
    # Whole parameters, for as long as they are: a sweep that sees the shards does not see them.
    ("torch.distributed.%s._fsdp_param:FSDPParam.%s" % (where, name), PARAMETER)
    for where in _FSDP2
    for name in ("init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param")
) + tuple(
    # Averages of weights that are no modules.
    (path, PARAMETER_COPY)
    for kind in ("diffusers.training_utils:EMAModel", "torch_ema.ema:ExponentialMovingAverage")
    for path in (kind + ".__init__", kind + ".to")
) + tuple(
    # Gradients of shards, and the buckets that they come in.
    ("torch.distributed.%s._fsdp_collectives:foreach_reduce" % where, REDUCTION)
    for where in _FSDP2
)


def register() -> bool:
    """Tells the agent all of them; whether modules' calls are among them."""
    module = _at("torch.nn.modules.module:Module")
    call = getattr(module, "_wrapped_call_impl", None) or getattr(module, "_call_impl", None)
    found = tell(_code(call), MODULE)
    for code in _wrappers():
        tell(code, OPTIMIZER)
    for kind in _optimizers():
        register_optimizer(kind)
    register_others()
    return found


def is_unhooked() -> bool:
    """Whether PyTorch's compiler has taken the wrappers of optimizers' steps away, and with them all hooks: up to 2.2 it does."""
    if "torch._dynamo" not in sys.modules:
        return False
    steps = [vars(kind).get("step") for kind in _optimizers()]
    wrappers = _wrappers()
    # A decorator around a wrapper, such as `torch._dynamo.disable`, has its attributes and calls the hooks.
    hooked = [step for step in steps if getattr(step, "hooked", False)]
    return not all(any(_own_code(layer) in wrappers for layer in _layers(step)) for step in hooked)


def count_hooked() -> int:
    """Classes of optimizers of which one was made: PyTorch wraps the step of a class then."""
    found = _optimizers()
    for kind in found:
        derived: List[type] = type.__subclasses__(kind)
        found.extend(one for one in derived if one not in found)
    return sum(getattr(vars(kind).get("step"), "hooked", False) is True for kind in found)


def _optimizers() -> List[type]:
    optimizer = _at("torch.optim.optimizer:Optimizer")
    return optimizer.__subclasses__() if isinstance(optimizer, type) else []


def _wrappers() -> List[CodeType]:
    """All optimizers' steps are wrapped by one function, written inside of another."""
    names = ("profile_hook_step", "_hook_for_profile")
    return [code for name in names for code in _nested(_code(_at("torch.optim.optimizer:Optimizer." + name)), "wrapper")]


def register_others() -> None:
    """Those that are there by now: the program may import some of them late."""
    for path, what in _OTHERS:
        tell(_code(_at(path)), what)
    for code, is_update in _caches.codes():
        tell(code, CACHE_UPDATE if is_update else KV_CACHE)
    _register_custom_functions(_at("torch.autograd.function:Function"))


#: Addresses of the classes that were told.
_custom: Set[int] = set()


def _register_custom_functions(kind: Any) -> None:
    """Forward passes of functions with a backward pass of their own: they run without gradients, in a training too."""
    waiting = [kind] if isinstance(kind, type) else []
    while waiting and len(_custom) < _MOST_CUSTOM:
        kind = waiting.pop()
        waiting += type.__subclasses__(kind)
        if id(kind) not in _custom:
            _custom.add(id(kind))
            tell(_code(kind.__dict__.get("forward")), CUSTOM_FUNCTION)


def _functions(module: Any) -> Iterator[Any]:
    """Those that are written in a Python module, in its classes as well."""
    for thing in list(vars(module).values()):
        if getattr(thing, "__module__", None) == module.__name__:
            yield from vars(thing).values() if isinstance(thing, type) else (thing,)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def hide() -> None:
    """Dynamo does not look at our functions. It would compile each that runs while a model's code is not in a graph: for
    seconds, and it would count them among the program's.
    """
    dynamo = getattr(getattr(sys.modules["torch"], "_C", None), "_dynamo", None)
    dynamo = getattr(dynamo, "eval_frame", None)
    skip = getattr(dynamo, "skip_code", None)
    tell_strategy = getattr(dynamo, "set_code_exec_strategy", None)  # since 2.7
    if dynamo is not None and tell_strategy is not None:
        action = dynamo._FrameAction.SKIP
        skip = partial(_skip, tell_strategy, dynamo._FrameExecStrategy(action, action))
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(__package__ + "._") and module is not None:
            for function in _functions(module):
                code = _code(function)
                for each in _with_inner(code) if code is not None else ():
                    skip(each)


def _skip(tell_strategy: Any, strategy: Any, code: CodeType) -> None:
    tell_strategy(code, strategy)


def register_optimizer(kind: type) -> None:
    """The step of a class of optimizers."""
    tell(_code(kind.__dict__.get("step")), STEP)
