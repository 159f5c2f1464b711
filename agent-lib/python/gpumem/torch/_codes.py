"""PyTorch functions whose frames show what a thread is doing or what memory is for.

The agent identifies them by the address of their code object. They are looked up by name, independent of the release: a
name that a release lacks is skipped.
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
    CLOSURE,
    COPYING,
    CUSTOM_FUNCTION,
    GRADIENT,
    KV_CACHE,
    MODULE,
    MODULE_HOOK,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    PARAMETER_COPY,
    REDUCTION,
    SETUP,
    STEP,
    ZERO_GRAD,
)

#: Registered code objects by address. Never freed, because the agent compares addresses.
_kept: Dict[int, CodeType] = {}
#: Maximum number of custom functions whose forward pass is registered.
_MOST_CUSTOM = 1000
#: Maximum number of closures that are registered, because a program may create their code again and again.
_MOST_CLOSURES = 16


def _layers(thing: Any) -> Iterator[Any]:
    """Yields a function and the functions inside its decorators, outermost first, as far as ``__wrapped__`` leads."""
    for _ in range(9):
        yield thing
        thing = getattr(thing, "__wrapped__", None)
        if thing is None:
            return


def _own_code(thing: Any) -> Optional[CodeType]:
    code = getattr(getattr(thing, "__func__", thing), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _code(thing: Any) -> Optional[CodeType]:
    """Returns the code of a function inside its decorators, or ``None``."""
    *_, inner = _layers(thing)
    return _own_code(inner)


def register_code(code: Optional[CodeType], what: int) -> bool:
    """Registers a code object with the agent. Returns ``False`` if there is none."""
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
    """Yields the functions called ``name`` that are defined inside another one."""
    for constant in code.co_consts if code is not None else ():
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                yield constant
            yield from _nested(constant, name)


def _at(path: str) -> Any:
    """Resolves ``package.module:name.name``; ``None`` if the module is not loaded or lacks it."""
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
    # No hook reports a copied module.
    ("torch.nn.parameter:Parameter.__deepcopy__", COPYING),
    # Tensors kept here belong to the optimizer. An optimizer without a step so far is searched for.
    ("torch.optim.optimizer:Optimizer.load_state_dict", STEP),
    # Moves one tensor of a state to its parameter's device. No step is running, so the phase alone would classify it as
    # temporary.
    ("torch.optim.optimizer:Optimizer._process_value_according_to_param_policy", OPTIMIZER_STATE),
    ("torch.optim.optimizer:Optimizer.zero_grad", ZERO_GRAD),
    ("torch.nn.modules.module:Module.zero_grad", ZERO_GRAD),
    ("torch.utils.data._utils.worker:_worker_loop", BOUNDARY),
    ("torch.utils.data._utils.pin_memory:_pin_memory_loop", BOUNDARY),
    # These call C++ code that allocates gradient buckets; the buckets are rebuilt in the second pass.
    ("torch.nn.parallel.distributed:DistributedDataParallel._ddp_init_helper", GRADIENT),
    ("torch.nn.parallel.distributed:DistributedDataParallel._pre_forward", GRADIENT),
) + tuple(
    # Unsharded parameters: a sweep sees only the shards.
    ("torch.distributed.%s._fsdp_param:FSDPParam.%s" % (where, name), PARAMETER)
    for where in _FSDP2
    for name in ("init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param")
) + tuple(
    # Averages of weights that are not modules.
    (path, PARAMETER_COPY)
    for kind in ("diffusers.training_utils:EMAModel", "torch_ema.ema:ExponentialMovingAverage")
    for path in (kind + ".__init__", kind + ".to")
) + tuple(
    # Gradients of shards, and their buckets.
    ("torch.distributed.%s._fsdp_collectives:foreach_reduce" % where, REDUCTION)
    for where in _FSDP2
)


def register() -> bool:
    """Registers all functions with the agent. Returns whether the call of modules is among them."""
    module = _at("torch.nn.modules.module:Module")
    call = getattr(module, "_wrapped_call_impl", None) or getattr(module, "_call_impl", None)
    found = register_code(_code(call), MODULE)
    for code in _wrappers():
        register_code(code, OPTIMIZER)
    for name in ("_set_user_hook", "setup_output_hook"):
        for code in _nested(_code(_at("torch.utils.hooks:BackwardHook." + name)), "hook"):
            register_code(code, MODULE_HOOK)
    for kind in _optimizers():
        register_optimizer(kind)
    register_others()
    return found


def is_unhooked() -> bool:
    """Returns whether PyTorch's compiler removed the wrappers of optimizer steps and their hooks, as releases up to 2.2 do."""
    if "torch._dynamo" not in sys.modules:
        return False
    steps = [vars(kind).get("step") for kind in _optimizers()]
    wrappers = _wrappers()
    # A decorator around a wrapper, such as `torch._dynamo.disable`, copies its attributes and still calls the hooks.
    hooked = [step for step in steps if getattr(step, "hooked", False)]
    return not all(any(_own_code(layer) in wrappers for layer in _layers(step)) for step in hooked)


def count_hooked() -> int:
    """Counts optimizer classes that have instances: PyTorch wraps a class's step at its first instance."""
    found = _optimizers()
    for kind in found:
        derived: List[type] = type.__subclasses__(kind)
        found.extend(one for one in derived if one not in found)
    return sum(getattr(vars(kind).get("step"), "hooked", False) is True for kind in found)


def _optimizers() -> List[type]:
    optimizer = _at("torch.optim.optimizer:Optimizer")
    return optimizer.__subclasses__() if isinstance(optimizer, type) else []


def _wrappers() -> List[CodeType]:
    """Returns the code of the function that wraps every optimizer's step; it is nested in another function."""
    names = ("profile_hook_step", "_hook_for_profile")
    return [code for name in names for code in _nested(_code(_at("torch.optim.optimizer:Optimizer." + name)), "wrapper")]


def register_others() -> None:
    """Registers the functions whose modules are loaded by now; the program may import some later."""
    for path, what in _OTHERS:
        register_code(_code(_at(path)), what)
    for code, is_update in _caches.codes():
        register_code(code, CACHE_UPDATE if is_update else KV_CACHE)
    _register_custom_functions(_at("torch.autograd.function:Function"))


#: Addresses of registered classes.
_custom: Set[int] = set()


def _register_custom_functions(kind: Any) -> None:
    """Registers forward passes of custom autograd functions: they run without gradients even in training."""
    waiting = [kind] if isinstance(kind, type) else []
    while waiting and len(_custom) < _MOST_CUSTOM:
        kind = waiting.pop()
        waiting += type.__subclasses__(kind)
        if id(kind) not in _custom:
            _custom.add(id(kind))
            register_code(_code(kind.__dict__.get("forward")), CUSTOM_FUNCTION)


def _functions(module: Any) -> Iterator[Any]:
    """Yields the functions defined in a Python module, including methods."""
    for thing in list(vars(module).values()):
        if getattr(thing, "__module__", None) == module.__name__:
            yield from vars(thing).values() if isinstance(thing, type) else (thing,)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def hide() -> None:
    """Excludes this package from Dynamo, which would otherwise compile each of its functions that runs outside a graph.

    That would take seconds, and would count as the program's compilation.
    """
    dynamo = getattr(getattr(sys.modules["torch"], "_C", None), "_dynamo", None)
    dynamo = getattr(dynamo, "eval_frame", None)
    skip = getattr(dynamo, "skip_code", None)
    set_strategy = getattr(dynamo, "set_code_exec_strategy", None)  # since 2.7
    if dynamo is not None and set_strategy is not None:
        action = dynamo._FrameAction.SKIP
        skip = partial(_skip, set_strategy, dynamo._FrameExecStrategy(action, action))
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(__package__ + "._") and module is not None:
            for function in _functions(module):
                code = _code(function)
                for each in _with_inner(code) if code is not None else ():
                    skip(each)


def _skip(set_strategy: Any, strategy: Any, code: CodeType) -> None:
    set_strategy(code, strategy)


def register_optimizer(kind: type) -> None:
    """Registers the step of an optimizer class."""
    register_code(_code(kind.__dict__.get("step")), STEP)


#: Addresses of the registered code of closures.
_closures: Set[int] = set()


def register_closure(closure: Any) -> None:
    """Registers the function that an optimizer's step calls to compute the loss; ``None`` if the step has none."""
    while isinstance(closure, partial):
        closure = closure.func
    code = _code(closure) or _code(getattr(type(closure), "__call__", None))
    if code is not None and id(code) not in _kept and len(_closures) < _MOST_CLOSURES:
        _closures.add(id(code))
        register_code(code, CLOSURE)
