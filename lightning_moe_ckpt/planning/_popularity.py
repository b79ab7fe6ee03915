"""Popularity of experts over the history of a run, not of a process.

Each rank measures its own tokens, step by step, and holds the result at every multiple of `reorder_every_n_steps`
until the next window boundary carries it to the others. All measures are linear, so sums over ranks are taken there
and nowhere else. What a rank has measured is journaled with the window's first boundary: a resumed run re-runs the
steps after it, counts each of them once, and has the popularity that the undisturbed run has at the same step.

Source: MoEvement (2024), Sec. 3.5, Appendix B.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.journal import Arrival, Arrivals
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet
from lightning_moe_ckpt.policies import Popularity, decayed_popularity, popularity_per_capacity

# Shape suffix: E experts of all layers, over all ranks.


class PopularityMeter:
    """Measures the tokens of this rank.

    Args:
        config: what is measured.
        operators: found in `module`.
        module: the model; hooks are registered while installed.

    Raises:
        ConfigurationError: a layer does not show what `config` needs.
    """

    def __init__(self, config: Popularity, operators: OperatorSet, module: nn.Module) -> None:
        self._config = config
        self._counter = LoadCounter(operators, module, "tokens" if config.counts == "hard" else "probabilities")
        self._capacity = LoadCounter(operators, module, "capacity") if config.per_capacity else None
        if config.counts == "soft":
            _require(self._counter, "counts='soft'", "router probabilities", "counts='hard'", "probabilities")
        if self._capacity is not None:
            _require(self._capacity, "per_capacity=True", "the capacity of experts", "per_capacity=False", "capacity")
        self._value_E = torch.zeros(operators.num_experts, dtype=torch.float64)
        self._held: list[Tensor] = []
        self._arrivals, self._coming = Arrivals(), list[Arrival]()
        """Of what is held."""

    @property
    def counts_tokens(self) -> bool:
        """Whether what is measured are tokens, not probabilities."""
        return self._config.counts == "hard"

    def install(self) -> None:
        """Start measuring."""
        self._counter.install()
        if self._capacity is not None:
            self._capacity.install()

    def remove(self) -> None:
        """Take all hooks off."""
        self._counter.remove()
        if self._capacity is not None:
            self._capacity.remove()

    def distrust(self, layers: Collection[str]) -> None:
        """Count nothing in these layers: their experts keep their order."""
        self._counter.distrust(layers)

    def stepped(self, step: int) -> None:
        """Optimizer step `step` has ended, with all its micro-batches. Nothing waits for the device."""
        due = step % self._config.reorder_every_n_steps == 0
        if self._every_step or due:
            self._fold()
        if due:
            self._hold([self._value_E.clone()])
            if self._config.half_life_steps is None:
                self._value_E = torch.zeros_like(self._value_E)

    def take_held(self) -> Tensor:
        """What was held since the last call, oldest first: float64 `[looks, E]`, on the CPU.

        Equally many on all ranks, since steps are. Only here something waits for the device, up to the step of the look.
        """
        coming, self._coming, self._held = self._coming, [], []
        if not coming:
            return torch.zeros(0, len(self._value_E), dtype=torch.float64)
        return torch.stack([value_E for each in coming for value_E in each.wait()])

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self._value_E)

    def value(self) -> Tensor:
        """Popularity of this rank's tokens now, float64 `[E]`."""
        if not self._every_step:
            self._fold()
        return self._value_E

    def newest(self) -> Tensor:
        """What a plan may be made of outside the looks: `value`, or the look just held if that has reset it."""
        if self._held and self._config.half_life_steps is None:
            return self._held[-1]
        return self.value()

    def state(self) -> dict[str, Any]:
        """What a later life needs to go on from this boundary; tensors may be on the device."""
        return {"measure": self._measure, "value": self.value().clone(), "held": list(self._held)}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on from a state; `False` if it measured something else, then this starts anew."""
        if state["measure"] != self._measure:
            return False
        self._value_E, self._held, self._coming = state["value"].clone(), [], []
        self._hold(state["held"])
        return True

    # -- private

    @property
    def _measure(self) -> dict[str, Any]:
        """What makes values comparable; thresholds may change between lives."""
        names = ("counts", "half_life_steps", "per_capacity", "reorder_every_n_steps")
        return {name: getattr(self._config, name) for name in names}

    @property
    def _every_step(self) -> bool:
        """Whether steps weigh differently; otherwise counts may pile up until they are needed."""
        return self._config.half_life_steps is not None or self._config.per_capacity

    def _hold(self, values: Sequence[Tensor]) -> None:
        self._held += values
        self._coming += [self._arrivals.start([value_E]) for value_E in values]

    def _fold(self) -> None:
        counts_E = self._counter.read_and_reset().double()
        if self._capacity is not None:
            counts_E = popularity_per_capacity(counts_E, self._capacity.read_and_reset())
        value_E = self._value_E.to(counts_E.device)
        half_life = self._config.half_life_steps
        if half_life is None:
            self._value_E = value_E + counts_E
        else:
            self._value_E = decayed_popularity(value_E, counts_E, half_life_steps=half_life)


def sum_in_order(rows: Sequence[Tensor]) -> Tensor:
    """Sum over ranks, first rank first: the same bits on every rank and in every life."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _require(counter: LoadCounter, wanted: str, what: str, instead: str, field: str) -> None:
    if counter.uncounted:
        layers = ", ".join(f"`{name or 'root'}`" for name in counter.uncounted)
        raise ConfigurationError(
            f"`Popularity({wanted})`: {what} cannot be seen in {layers}. "
            f"Use `{instead}`, or `register_adapter` with a `MoELayerSpec({field}=...)` that says where they are."
        )
