"""Sizes of models by element type, for advice: which parameters require gradients, and which an optimizer updates."""

import sys
from typing import Any, Callable, Dict, Iterator, List, Tuple

from ._agent import functions, text

#: Maximum number of lines that are sent, and of letters of a model's name.
_LINES, _NAME = 16, 80


def _keepers() -> List[str]:
    """Returns the libraries that keep models and optimizers: accelerate, once the program has made an Accelerator."""
    try:
        state = sys.modules["accelerate.state"].AcceleratorState._shared_state
        return ["accelerate"] if state else []
    except Exception:  # not imported, or another version of it
        return []


class Models:
    """Sums of bytes. `parts` yields the tensors with memory of a tensor."""

    def __init__(self, parts: Callable[[Any], Iterator[Any]], optimizers: List[Any]) -> None:
        self._parts = parts
        groups = (group for optimizer in optimizers for group in list(optimizer.param_groups))
        self._updated = {id(parameter) for group in groups for parameter in list(group["params"])}
        #: Model and element type -> bytes, bytes that require gradients, bytes that an optimizer updates.
        self._bytes: Dict[Tuple[str, str], List[int]] = {}

    def add(self, path: str, parameter: Any) -> None:
        """Adds a parameter of the model that begins `path`."""
        try:
            is_trained, is_updated = parameter.requires_grad, id(parameter) in self._updated
            self._add(path.split("/", 1)[0], parameter, is_trained, is_updated)
        except Exception:  # without a size so far
            pass

    def _add(self, model: str, tensor: Any, is_trained: bool, is_updated: bool) -> None:
        for part in self._parts(tensor):
            if part.is_cuda:
                name = model[:_NAME].replace("\t", " ").replace("\n", " ")
                sums = self._bytes.setdefault((name, str(part.dtype).rpartition(".")[2]), [0, 0, 0])
                for at, counts in enumerate((True, is_trained, is_updated)):
                    sums[at] += part.numel() * part.element_size() if counts else 0

    def add_state(self, tensor: Any) -> None:
        """Adds a tensor of an optimizer's state."""
        try:
            self._add("", tensor, False, False)
        except Exception:  # without a size so far
            pass

    def send(self) -> None:
        """Sends the libraries that keep models, and the largest sums."""
        largest = sorted(self._bytes.items(), key=lambda item: -item[1][0])[:_LINES]
        lines = ["\t".join((*key, *map(str, sums))) for key, sums in largest]
        functions.models(text("\n".join((_keepers() if lines else []) + lines)))
