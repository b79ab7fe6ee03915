"""Running averages of the weights, as state that is captured with the operators whose parameters they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_moe_ckpt.parallel import shard_of

AVERAGE_PREFIX = "average."
"""Prefix of averages' names; no key of an optimizer's state has it."""


def is_average(key: str) -> bool:
    """Return whether a record's `state_key`, or a buffer's name, belongs to an average."""
    return key.startswith(AVERAGE_PREFIX)


class Averages:
    """Running averages of the weights (EMA, SWA), as state of the operators whose parameters they follow.

    An average is updated only from the parameter it follows. It is captured in the same window step as its operator.
    Until that step's snapshot is loaded in replay it may have any value: an average of frozen, outdated weights is
    overwritten when the operator becomes active. If forward runs on averages between optimizer steps (`consumed`:
    validation with averaged weights), they are taken with the weights of operators whose full state is not taken yet.

    Models are copies of the trained module, in the same order in every process.
    """

    def __init__(self, models: Sequence[AveragedModel], *, consumed: bool) -> None:
        self._models = {f"{AVERAGE_PREFIX}{index}": model for index, model in enumerate(models)}
        self.consumed = consumed
        """Whether weights captured for forward are captured with their averages."""
        self.names = frozenset(self._models)
        """Names of the averages, which are keys of fields in records."""
        self._tensors: dict[str, dict[str, nn.Parameter]] = {
            name: dict(model.module.named_parameters()) for name, model in self._models.items()
        }

    def cut(self, params: Mapping[str, Tensor]) -> None:
        """Follow pieces of parameters where `params`, by name, are an optimizer's shards."""
        for tensors in self._tensors.values():
            cut = {fqn: own.like(tensors[fqn]).stepped for fqn, p in params.items() if (own := shard_of(p)) is not None}
            tensors.update(cut)

    def all(self) -> list[dict[str, nn.Parameter]]:
        """Return all averages, in the order of their models, by the parameter's name."""
        return list(self._tensors.values())

    def assuming(self, *, consumed: bool) -> Averages:
        """Return these averages for another process's plan, which may have validated on averages."""
        return Averages(list(self._models.values()), consumed=consumed)

    def of(self, fqn: str) -> dict[str, Tensor]:
        """Return a parameter's averages, by name."""
        return {name: tensors[fqn] for name, tensors in self._tensors.items()}

    def consumed_of(self, fqn: str) -> dict[str, Tensor]:
        """Return a parameter's averages that forward reads, by name."""
        return self.of(fqn) if self.consumed else {}

    def buffer_owners(self) -> dict[str, tuple[nn.Module, str]]:
        """Return owner and attribute of the averages' buffers (number of updates, averaged statistics), by name."""
        return {
            f"{name}/{fqn}": (model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2])
            for name, model in self._models.items()
            for fqn, _ in model.named_buffers()
        }
