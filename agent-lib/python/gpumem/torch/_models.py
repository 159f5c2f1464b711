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
        #: Model and element type -> bytes, bytes that require gradients, bytes that an optimizer updates, bytes of embedding
        #: tables whose gradients are dense, and of those whose gradients are sparse.
        self._bytes: Dict[Tuple[str, str], List[int]] = {}
        #: Trained embedding tables, by the address of the parameter: its model, the parameter, and whether its gradient is sparse.
        self._tables: Dict[int, Tuple[str, Any, bool]] = {}

    def add(self, path: str, parameter: Any, module: Any) -> None:
        """Adds a parameter of the model that begins `path`."""
        try:
            model, is_trained = path.split("/", 1)[0], parameter.requires_grad
            self._add(model, parameter, (True, is_trained, id(parameter) in self._updated))
            nn = sys.modules["torch"].nn
            # Activations do not bound the rows of a batch that a bag sums up, so bags with dense gradients do not count.
            is_table = isinstance(module, nn.Embedding) or isinstance(module, nn.EmbeddingBag) and module.sparse
            if is_trained and is_table:
                self._tables[id(parameter)] = model, parameter, bool(module.sparse)
        except Exception:  # without a size so far
            pass

    def tied(self, parameter: Any) -> None:
        """Notes that a second module has a parameter, such as the head of a language model: its gradient is dense."""
        self._tables.pop(id(parameter), None)

    def _add(self, model: str, tensor: Any, kinds: Tuple[bool, ...]) -> None:
        for part in self._parts(tensor):
            if part.is_cuda:
                name = model[:_NAME].replace("\t", " ").replace("\n", " ")
                sums = self._bytes.setdefault((name, str(part.dtype).rpartition(".")[2]), [0] * 5)
                for at, counts in enumerate(kinds):
                    sums[at] += part.numel() * part.element_size() if counts else 0

    def add_state(self, tensor: Any) -> None:
        """Adds a tensor of an optimizer's state."""
        try:
            self._add("", tensor, (True,))
        except Exception:  # without a size so far
            pass

    def send(self) -> None:
        """Sends the libraries that keep models, and the largest sums."""
        for model, parameter, is_sparse in self._tables.values():
            try:
                self._add(model, parameter, (False, False, False, not is_sparse, is_sparse))
            except Exception:  # without a size so far
                pass
        self._tables.clear()  # the program may free the parameters
        largest = sorted(self._bytes.items(), key=lambda item: -item[1][0])[:_LINES]
        lines = ["\t".join((*key, *map(str, sums))) for key, sums in largest]
        functions.models(text("\n".join((_keepers() if lines else []) + lines)))
