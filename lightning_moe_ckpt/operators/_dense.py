"""Group the parameters outside expert layers: one operator per transformer block, the rest by child module.

Blocks are the children of the outermost `ModuleList` on a parameter's path (or of a `Sequential` or `ModuleDict` that
repeats a class). A module that contains blocks is opened: embeddings, final norm and head beside the blocks become
operators of their own, never one giant operator.

Source: MoEvement (2024), Appendix E (each layer of a dense model is an operator).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from torch import nn

from lightning_moe_ckpt.operators._children import child_slots

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class DenseGroups:
    """Assigns each dense parameter to a group.

    Args:
        module: the model.
        fqns: names of the dense parameters.
    """

    def __init__(self, module: nn.Module, fqns: Iterable[str]) -> None:
        self._modules = dict(module.named_modules(remove_duplicate=False))
        owners = {fqn: fqn.rpartition(".")[0] for fqn in fqns}
        self._live = {prefix for owner in set(owners.values()) for prefix in _prefixes(owner)} | {""}
        self._containers = {prefix for prefix in self._live if self._repeats_blocks(prefix)}
        self._open = {outer for inner in self._containers for outer in _prefixes(inner)} | {""}
        self._open_only_children(set(owners.values()))

    def group(self, fqn: str) -> str:
        """Return the group of parameter `fqn`: a block, a child module, or the opened module that owns it."""
        owner = fqn.rpartition(".")[0]
        path = [*_prefixes(owner)]
        for outer, inner in pairwise(path):
            if outer in self._containers:
                return inner
        return next((prefix for prefix in path if prefix not in self._open), owner) or "root"

    def _repeats_blocks(self, prefix: str) -> bool:
        module = self._modules[prefix]
        slots = child_slots(module).items()
        kinds = Counter(type(child) for name, child in slots if child is not None and self._has(prefix, name))
        if isinstance(module, nn.ModuleList):
            return bool(kinds)
        if isinstance(module, nn.ModuleDict):
            # Named stages are no blocks, even if each of them is a Sequential.
            return any(n > 1 and not issubclass(kind, _CONTAINERS) for kind, n in kinds.items())
        return isinstance(module, nn.Sequential) and any(n > 1 for n in kinds.values())

    def _has(self, prefix: str, child: str) -> bool:
        return _join(prefix, child) in self._live

    def _open_only_children(self, owners: set[str]) -> None:
        """Open a wrapper's only child, so that `self.model` of a LightningModule is not one giant operator."""
        prefix = ""
        while prefix not in self._containers and prefix not in owners:
            children = [name for name in child_slots(self._modules[prefix]) if self._has(prefix, name)]
            if len(children) != 1:
                return
            prefix = _join(prefix, children[0])
            if not any(self._has(prefix, name) for name in child_slots(self._modules[prefix])):
                return
            self._open.add(prefix)


def _prefixes(path: str) -> Iterator[str]:
    """Yield `""`, `a`, `a.b` for `a.b`."""
    yield ""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
