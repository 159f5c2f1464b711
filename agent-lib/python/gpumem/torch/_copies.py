"""Copies of trained modules: averaged weights (EMA, SWA), target networks, reference models.

A module is a copy if two conditions hold. None of its parameters was ever trained: no optimizer step, no gradient. And a
module with the same structure, parameter names and shapes is trained.

Whole models are compared, also inside wrappers such as `AveragedModel`, and named parts of a model that have parts
(`agent.critic` and `agent.target_critic`). Layers are not compared: frozen layers of a trained model have the same
structure as trained neighbours and are no copies.
"""

from typing import Any, Dict, Iterator, List, Set, Tuple

from ._modules import Known, Modules

#: Steps after which an optimizer counts as training. Before that, other models may not have had their first step yet.
_STEPS = 2
#: Maximum nesting of modules; a deeper one is a cycle.
_DEEPEST = 100

_Signature = Tuple[Any, ...]


class _Node:
    """A module with its own parameters and child modules."""

    __slots__ = ("known", "kind", "own", "parts", "is_trained", "was_trained", "is_empty")

    def __init__(self, known: Known, kind: str, own: List[Tuple[str, Any]]) -> None:
        self.known, self.kind, self.own = known, kind, own
        self.parts: List[Tuple[str, "_Node"]] = []
        #: Flags of the module including its descendants.
        self.is_trained = self.was_trained = False
        self.is_empty = not own

    def sum(self, depth: int = 0) -> None:
        """Merges the flags of its descendants."""
        for _, part in self.parts if depth < _DEEPEST else ():
            part.sum(depth + 1)
            self.is_trained |= part.is_trained
            self.was_trained |= part.was_trained
            self.is_empty &= part.is_empty

    def filled(self) -> List[Tuple[str, "_Node"]]:
        """Returns the child modules that have parameters."""
        return [(name, part) for name, part in self.parts if not part.is_empty]

    def within(self, path: str = "", depth: int = 0) -> Iterator[Tuple[str, "_Node"]]:
        """Yields this node and its descendants, with paths relative to this node."""
        yield path, self
        for name, part in self.parts if depth < _DEEPEST else ():
            yield from part.within("%s/%s" % (path, name), depth + 1)

    def signature(self) -> _Signature:
        """Returns a key that copies share: names and shapes, for a single layer also its class."""
        shapes = sorted((path, name, tuple(tensor.shape)) for path, node in self.within() for name, tensor in node.own)
        return ("" if self.filled() else self.kind, *shapes)

    def models(self) -> Iterator["_Node"]:
        """Yields this node, the models it wraps, and its named parts that have parts."""
        yield self
        at, filled = self, self.filled()
        while len(filled) == 1 and not at.own:
            at = filled[0][1]
            yield at
            filled = at.filled()
        for name, part in filled:
            if not name.isdigit() and part.filled():
                yield part


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.requires_grad and tensor.is_leaf and tensor.grad is not None)


def find(modules: Modules, optimizers: List[Any], done: Dict[int, int], gradients: bool) -> Set[int]:
    """Returns keys of all modules that are copies or inside one. `gradients` allows reading them: no backward pass is running."""
    parameters = (p for one in optimizers if done.get(id(one), 0) >= _STEPS for group in list(one.param_groups) for p in list(group["params"]))
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if not trained:
        return set()
    nodes: Dict[int, _Node] = {}
    for module, known in modules:
        fields = object.__getattribute__(module, "__dict__")
        tensors = fields.get("_parameters")
        if known.generated or fields.get("_is_replica") is True:
            continue
        own = [(name, tensor) for name, tensor in list(tensors.items()) if tensor is not None] if isinstance(tensors, dict) else []
        node = nodes[known.key] = _Node(known, type(module).__name__, own)
        node.is_trained = any(id(tensor) in trained for _, tensor in own)
        if node.is_trained or (gradients and not known.was_trained and any(_has_gradient(tensor) for _, tensor in own)):
            known.was_trained = True
        node.was_trained = known.was_trained
    roots = []
    for node in nodes.values():
        above = nodes.get(node.known.parent)
        if above is None:
            roots.append(node)
        else:
            above.parts.append((node.known.name, node))
    for root in roots:
        root.sum()
    models = [model for root in roots for model in root.models()]
    waiting = [model for model in models if not model.was_trained and not model.is_empty]
    if not waiting:
        return set()
    wanted = {model.signature() for model in models if model.is_trained}
    copies = [model for model in waiting if model.signature() in wanted]
    return {node.known.key for copy in copies for _, node in copy.within()}
