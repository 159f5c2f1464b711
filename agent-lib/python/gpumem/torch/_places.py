"""Where modules are in their models, from the roots down: each has the first path that `named_modules()` of the first root gives it.

Roots come in this order: those that the program has named, then by age. What a compiler made (torch.fx.GraphModule) names only what no
other module holds. Modules are told apart by their keys alone: to compare references would compare modules.
"""

from typing import Any, Dict, List, Set, Tuple

#: Parts of a module: name, part, and whether the part stands in the place of the module, which wraps it.
Parts = Dict[int, List[Tuple[str, Any, bool]]]
#: A module, the key of its parent (0 for a root), and its name there.
Place = Tuple[Any, int, str]


class Places:
    """The places of `live`; see the module's text."""

    def __init__(self, live: List[Any], parts: Parts) -> None:
        self.parts = parts
        self.known = {one.key: one for one in live}
        #: Parents of those that have a place.
        self.parents: Dict[int, int] = {}
        #: Parents come first.
        self.order: List[Place] = []
        #: Of roots that have the name of another root: its key. A wrapper has that of what it wraps, unless the program has named it.
        self.alike: Dict[int, int] = {}
        for root in self._by_rank(live):
            if root.key not in self.parents:
                self._root(root)

    def _by_rank(self, live: List[Any]) -> List[Any]:
        held: Set[int] = set()
        used: Set[int] = set()  # by what a compiler made
        for one in live:
            (used if one.made else held).update(below.key for _, below, _ in self.parts[one.key] if below is not one)

        def rank(one: Any) -> Tuple[int, bool, bool, int]:
            if one.given:
                return 0, False, False, one.order
            is_root = one.key not in held and not one.made and (one.key not in used or one.number > 0)
            # Behind the roots: what a compiler made, and cycles. A cycle begins where it began before.
            return (1, False, False, one.order) if is_root else (2, one.made, one.parent != 0, one.order)

        return sorted(live, key=rank)

    def _root(self, root: Any) -> None:
        """Gives a place to a root, to what it wraps, and to everything below."""
        around, leader = [root.key], root.key
        while True:
            inner = self.known.get(self.known[around[-1]].inner)
            if inner is None or inner.key in around or (inner.given and root.given):
                leader = root.key if root.given else around[-1]
                break
            if inner.key in self.parents:
                leader = inner.key
                if self.parents[leader]:  # it is a part of another model
                    around, leader = [root.key], root.key
                break
            around.append(inner.key)
            if inner.given:
                leader = inner.key
                break
        for key in around:
            self._put(self.known[key], 0, "")
            if key != leader:
                self.alike[key] = leader
        for key in around:
            self._below([(part, key, name) for name, part, _ in self.parts[key]])

    def _put(self, one: Any, parent: int, name: str) -> None:
        self.parents[one.key] = parent
        self.order.append((one, parent, name))
        one.generated = one.made and not one.given and (not parent or self.known[parent].generated)

    def _below(self, places: List[Place]) -> None:
        """Goes down in the order of `named_modules()`."""
        stack = places[::-1]
        while stack:
            one, parent, name = stack.pop()
            if one.key in self.parents or one.given:
                continue
            self._put(one, parent, name)
            for own, part, is_inner in reversed(self.parts[one.key]):
                stack.append((part, parent, name) if is_inner else (part, one.key, own))
