from .. import Tensor
from . import modules  # noqa: F401
from .modules.module import Module  # noqa: F401


class Parameter(Tensor):
    pass
