"""Treat running averages of the weights (EMA, SWA) as state of the operators whose parameters they follow.

An average is updated from the parameter it follows and from nothing else. It is captured in the window step in which its
operator is. Until that step's snapshot is loaded in replay it may have any value: an average of frozen, outdated
weights is overwritten when the operator becomes active. If validation runs on averages, forward reads them too, so they are
taken with the weights of operators whose full state is not taken yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

PREFIX = "average."
"""Prefix of the names of averages; no key of an optimizer's state has it."""


def is_average(key: str) -> bool:
    """Return whether a record's `state_key`, or a buffer's name, belongs to an average."""
    return key.startswith(PREFIX)


class Averages:
    """Averaged copies of one module.

    Args:
        models: copies of the trained module, in an order that is the same in every process.
        consumed: whether forward runs on them between optimizer steps (validation with averaged weights).
    """

    def __init__(self, models: Sequence[AveragedModel], *, consumed: bool) -> None:
        self._models = {f"{PREFIX}{index}": model for index, model in enumerate(models)}
        self._consumed = consumed
        self.names = frozenset(self._models)
        """Names of the averages, which are keys of fields in records."""
        self._tensors = {name: dict(model.module.named_parameters()) for name, model in self._models.items()}

    @property
    def consumed(self) -> bool:
        """Whether weights that are captured for forward are captured with their averages."""
        return self._consumed

    def assuming(self, *, consumed: bool) -> Averages:
        """Return these averages for another process's plan, which may have validated on averages where this one does not."""
        return Averages(list(self._models.values()), consumed=consumed)

    def of(self, fqn: str) -> dict[str, Tensor]:
        """Return the averages of one parameter."""
        return {name: tensors[fqn] for name, tensors in self._tensors.items()}

    def consumed_of(self, fqn: str) -> dict[str, Tensor]:
        """Return the averages of one parameter that forward reads."""
        return self.of(fqn) if self._consumed else {}

    def buffer_owners(self) -> dict[str, tuple[nn.Module, str]]:
        """Return the buffers of the averages (number of updates, averaged statistics), by owner and attribute."""
        return {
            f"{name}/{fqn}": (model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2])
            for name, model in self._models.items()
            for fqn, _ in model.named_buffers()
        }
