"""PyTorch's compiler, which must see nothing of us: neither while it traces the program, nor while it looks at every function that the
program calls, as it does where it gave up tracing the caller.
"""

import sys
from typing import Any, Callable


def _never() -> bool:
    return False


def is_compiling() -> Callable[[], bool]:
    """PyTorch's function of that name: whether what calls it is being traced. The compiler knows the answer without running it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    asked = getattr(compiler, "is_compiling", None)
    return asked if callable(asked) else _never


def unseen(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs it while the compiler looks at nothing that this thread calls. Where nothing was compiled so far it is not even loaded."""
    switch = getattr(sys.modules.get("torch._dynamo.eval_frame"), "set_eval_frame", None)
    if switch is None:
        return work(*arguments)
    before = switch(None)
    try:
        return work(*arguments)
    finally:
        switch(before)
