"""Creates this package from the sources inside the agent, in a process that may not have it installed.

Runs with two globals: ``sources`` (text by module name) and ``addresses`` (of the agent's functions). Defines ``start``,
``tick`` and ``idle``.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Dict

if TYPE_CHECKING:
    sources: Dict[str, str]
    addresses: Dict[str, int]

_PRIVATE = "_gpumem_torch"


def _load() -> Any:
    package = sys.modules.get(_PRIVATE)
    if package is not None and hasattr(package, "_core"):
        return package._core
    if package is not None and package.__dict__.get("__path__"):
        # The program has imported the installed package, which has not started yet.
        from importlib import import_module

        return import_module(package.__name__ + "._core")
    package = ModuleType(_PRIVATE)
    package.__path__ = []
    package.__package__ = _PRIVATE
    sys.modules[_PRIVATE] = package
    try:
        for name, text in sources.items():
            module = ModuleType(_PRIVATE + "." + name)
            module.__package__ = _PRIVATE
            sys.modules[module.__name__] = module
            exec(compile(text, "<gpumem/torch/%s.py>" % name, "exec"), module.__dict__)
            setattr(package, name, module)
    except BaseException:
        for name in [_PRIVATE] + [_PRIVATE + "." + name for name in sources]:
            sys.modules.pop(name, None)
        raise
    return package._core


_core = _load()


def start() -> Any:
    return _core.start(lambda name: addresses.get(name, 0))


tick, idle = _core.tick, _core.idle
