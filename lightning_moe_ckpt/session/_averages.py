"""Running averages of the weights (EMA, SWA) are state of the operators whose parameters they follow.

An average is updated from the parameter it follows and from nothing else. So it is captured in the slot in which its
operator is, and until that slot is loaded in replay it may become what it likes: an average of frozen, outdated
weights is overwritten when they thaw. Where validation runs on averages, forward consumes them too, so they are part
of what is taken of operators whose turn is still to come.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

PREFIX = "average."
"""Names of averages begin so; no key of an optimizer's state does."""


def is_average(key: str) -> bool:
    """Whether a record's `state_key`, or a buffer's name, is of an average."""
    return key.startswith(PREFIX)


class Averages:
    """Averaged copies of one module.

    Args:
        models: copies of the trained module, in an order that is the same in every life.
        consumed: whether forward runs on them between optimizer steps (validation with averaged weights).
    """

    def __init__(self, models: Sequence[AveragedModel], *, consumed: bool) -> None:
        self._models = {f"{PREFIX}{index}": model for index, model in enumerate(models)}
        self._consumed = consumed
        self.names = frozenset(self._models)
        """Of the averages; keys of fields in records."""
        self._tensors = {name: dict(model.module.named_parameters()) for name, model in self._models.items()}

    @property
    def consumed(self) -> bool:
        """Whether weights that are captured for forward are captured with their averages."""
        return self._consumed

    def assuming(self, *, consumed: bool) -> Averages:
        """The same averages under a plan made by another life, which may have validated where this one does not."""
        return Averages(list(self._models.values()), consumed=consumed)

    def of(self, fqn: str) -> dict[str, Tensor]:
        """Averages of one parameter."""
        return {name: tensors[fqn] for name, tensors in self._tensors.items()}

    def consumed_of(self, fqn: str) -> dict[str, Tensor]:
        """Averages of one parameter that forward needs."""
        return self.of(fqn) if self._consumed else {}

    def buffer_owners(self) -> dict[str, tuple[nn.Module, str]]:
        """Buffers of the averages (how many updates there were, averaged statistics), by owner and attribute."""
        return {
            f"{name}/{fqn}": (model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2])
            for name, model in self._models.items()
            for fqn, _ in model.named_buffers()
        }
