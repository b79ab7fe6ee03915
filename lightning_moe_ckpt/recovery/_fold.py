"""Apply differences to the state before them: one pass over the state for many steps.

Each part of a parameter is read and written once, whatever the number of steps: its gradients are applied in the order
of the steps, with each step's settings. A part without a gradient comes whole, from the newest step.

Source: TierCheck (2026), Sec. 3.3, "fused multi-step differential checkpoint replaying". We differ in: the last step is
applied in the same pass, and the result is exact where the optimizer's arithmetic is repeated, see `replay_adam`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.native import AdamState, AdamStep, replay_adam, unpack_gradient
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.snapshot import GRADIENT, PACKED, PARAM, PRESENT, is_average, step_settings
from lightning_moe_ckpt.storage import SegmentLayout

_FULL, _DELTA = f"{RecordKind.FULL.value}/", f"{RecordKind.DELTA.value}/"
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_COUNT = "step"


@dataclass(frozen=True, eq=False, slots=True)
class Difference:
    """Difference between one boundary and the next, on one rank."""

    segment: Tensor
    """uint8."""
    layout: SegmentLayout
    journal: Journal

    def view(self, name: str) -> Tensor:
        """Return a tensor by its name in the file."""
        return self.layout.view(self.segment, name)


def fold(state_U8: Tensor, layout: SegmentLayout, differences: Sequence[Difference]) -> None:
    """Turn a state into a later boundary's state, in place.

    Args:
        state_U8: this rank's full segment of the boundary before the first difference.
        layout: layout of `state_U8`.
        differences: at least one, without a gap, oldest first.

    Raises:
        Corrupt: the differences do not fit the state, which may have been changed.
    """
    newest = differences[-1]
    try:
        for part, names in groupby(layout.names, lambda name: name.rpartition("/")[0]):
            if part.startswith(_FULL):
                _fold_part(state_U8, layout, part.removeprefix(_FULL), [*names], differences)
            else:  # buffers and journal
                for name in names:
                    layout.view(state_U8, name).copy_(newest.view(name))
    except (LookupError, ValueError, RuntimeError) as error:
        raise Corrupt(f"differences do not fit the state that they follow on ({error!r}).") from error


def _fold_part(
    state_U8: Tensor, layout: SegmentLayout, part: str, names: Sequence[str], differences: Sequence[Difference]
) -> None:
    """Apply the differences of one part of a parameter, whose tensors have `names` in the state."""
    newest = differences[-1]
    packed = f"{_DELTA}{part}/{PACKED}"
    gradient = packed if packed in newest.layout.spans else f"{_DELTA}{part}/{GRADIENT}"
    live = {name.rpartition("/")[2]: layout.view(state_U8, name) for name in names}
    if gradient not in newest.layout.spans:
        for key, tensor in live.items():
            tensor.copy_(newest.view(f"{_DELTA}{part}/{key}"))
        return
    for key in filter(is_average, live):
        live[key].copy_(newest.view(f"{_DELTA}{part}/{key}"))
    fqn, count = part.rpartition("/")[0], live[_COUNT]
    steps: list[AdamStep] = []
    for difference in differences:
        settings = step_settings(difference.journal, fqn)
        if settings is not None:
            number = int(count) + len(steps) + 1
            found = difference.view(gradient)
            steps.append(
                settings.step(unpack_gradient(found, live[PARAM].numel()) if gradient == packed else found, number)
            )
    if steps:
        replay_adam(AdamState(live[PARAM], *(live[key] for key in _MOMENTS if key in live)), steps)
        count += len(steps)
        live[PRESENT].fill_(1)
