"""Count the tokens per expert of all MoE layers, summed over ranks; numbers of each rank share the collective.

With pipeline stages ranks of a stage add up what they count, and every rank learns of the layers of other stages.

The counters are those that the planner of checkpoints reads. This module has its own accumulators, so that neither
reader changes what the other reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.metrics import load_skew
from lightning_moe_ckpt.operators import CountProbe, LoadCounter, OperatorSet, discover
from lightning_moe_ckpt.parallel import current_groups
from lightning_moe_ckpt.parallel._upstream import MAY_BE_MISSING, UpstreamLog

log = rank_logger(__name__)

# Shape suffixes: E all experts of one layer, over all ranks; R ranks; N numbers of a rank.


@dataclass(frozen=True)
class LayerLoad:
    """Load of one layer between two readings."""

    layer: str
    tokens: Tensor
    """int64 `[E]`, on the CPU: tokens that experts processed."""
    drops: Tensor | None
    """int64 `[E]`, on the CPU: tokens dropped over capacity; `None` if the layer does not count them."""

    def values(self) -> dict[str, float]:
        """Return the values to log of this layer, by name; empty if it had no tokens."""
        if (total := int(self.tokens.sum())) == 0:
            return {}
        values = {"min_share": int(self.tokens.min()) / total, "max_share": int(self.tokens.max()) / total}
        if self.tokens.numel() > 1:
            values["load_skew"] = load_skew(self.tokens).item()
        if self.drops is not None:
            dropped = int(self.drops.sum())
            values["dropped_share"] = dropped / (total + dropped)
        return values


class LayerLoads:
    """Count the tokens of all layers from construction to `remove`.

    Args:
        module: the model; layers without a counter of their own get hooks.
        ep_size: ranks that share the experts of a layer.
        device: device of the collectives' tensors.
        upstream: log of all stages' answers, for a stage that repeats steps; `None` without stages.

    Raises:
        UnknownLayout: something that looks like experts could not be placed.
    """

    def __init__(
        self, module: nn.Module, *, ep_size: int, device: torch.device, upstream: UpstreamLog | None = None
    ) -> None:
        found, self._device, self._upstream = discover(module, ep_size=ep_size), device, upstream
        if uncounted := [layer.fqn for layer in found.layers if layer.count is None]:
            log.warning("the load of %s is not logged: tokens cannot be counted there", uncounted)
        counted = tuple(layer for layer in found.layers if layer.count is not None)
        knowing = tuple(replace(layer, count=layer.dropped) for layer in counted if layer.dropped is not None)
        self._processed, self._dropped = replace(found, layers=counted), replace(found, layers=knowing)
        self._counters = [LoadCounter(each, module) for each in (self._processed, self._dropped)]
        for counter in self._counters:
            counter.install()
        self._probe, self._watching = CountProbe(self._processed, module), False

    def watch(self) -> None:
        """Check in the next step that tokens are counted as experts process them. The step must not be replayed."""
        if not self._probe.done:
            self._watching = True
            self._probe.install()

    def judge(self) -> None:
        """Leave out layers with wrong counts in the watched step. Call on all ranks, when gradients are complete."""
        if not self._watching or self._probe.done:
            return
        failures = self._probe.check(lambda vector: sum_over_ranks(vector, self._device))
        for failure in failures:
            log.warning("%s Its load is not logged.", failure)
        for counter in self._counters:
            counter.distrust([failure.layer for failure in failures])

    def hold(self) -> list[Callable[[], None]]:
        """Return functions to restore the present counts."""
        return [undo for counter in self._counters for undo in counter.hold()]

    def read(self, numbers: Sequence[int] = ()) -> tuple[list[LayerLoad], Tensor] | None:
        """Return the loads since the last call, by one collective of all ranks, or several with stages. Waits for the device.

        Args:
            numbers: numbers of this rank; every rank must give equally many.

        Returns:
            The loads, and `numbers` of every rank as int64 `[R, N]` on the CPU; `None` in a repeated step in which a failure
            had ended the reading.
        """
        distributed = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        ranks_RN = torch.zeros(world_size, len(numbers), dtype=torch.int64)
        ranks_RN[rank] = torch.tensor(numbers, dtype=torch.int64)
        counts = [counter.read_and_reset().to(self._device) for counter in self._counters]
        sizes = [self._processed.num_experts, self._dropped.num_experts]
        if (groups := current_groups()).num_stages == 1:
            # Each rank adds its numbers in its own row, so that the sum gathers them without a second collective.
            everything = torch.cat([*counts, ranks_RN.flatten().to(self._device)])
            *found, ranks = torch.split(sum_over_ranks(everything, self._device), [*sizes, ranks_RN.numel()])
            return self._loads(*found), ranks.view_as(ranks_RN)
        own = self._loads(*torch.split(sum_over_ranks(torch.cat(counts), self._device), sizes))
        said = [[each.layer, each.tokens, each.drops] for each in own]

        def ask() -> Any:
            told = Exchange(groups, "pipeline_control").gather_values(said)
            return [told, Exchange(groups).gather([*numbers]) if numbers else ranks_RN.tolist()]

        answered = ask() if self._upstream is None else self._upstream.answer(MAY_BE_MISSING, ask)
        return answered and ([LayerLoad(*each) for stage in answered[0] for each in stage], torch.tensor(answered[1]))

    def _loads(self, processed: Tensor, dropped: Tensor) -> list[LayerLoad]:
        drops = dict(_by_layer(self._dropped, dropped))
        return [LayerLoad(name, tokens_E, drops.get(name)) for name, tokens_E in _by_layer(self._processed, processed)]

    def remove(self) -> None:
        """Stop counting."""
        self._probe.remove()
        for counter in self._counters:
            counter.remove()


def sum_over_ranks(vector: Tensor, device: torch.device) -> Tensor:
    """Return the sum of a vector over all ranks of the stage, on the CPU, by one collective on `device`."""
    total = vector.to(device)
    if dist.is_available() and dist.is_initialized() and len(total):
        dist.all_reduce(total, group=_of_stage())
    return total.cpu()


def gather_over_ranks(vector: Tensor, device: torch.device) -> Tensor:
    """Return the vectors of all ranks of the stage, one a row in the order of ranks, on the CPU, by one collective on `device`."""
    own, stage = vector.to(device), _of_stage()
    if not (dist.is_available() and dist.is_initialized()):
        return own[None].cpu()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(stage))]
    dist.all_gather(rows, own, group=stage)
    return torch.stack(rows).cpu()


def _of_stage() -> dist.ProcessGroup | None:
    """Return the group of this rank's pipeline stage; `None`, which is the world, where there is one stage."""
    groups = current_groups()
    return groups.group("stage") if groups.num_stages > 1 else None


def _by_layer(operators: OperatorSet, counts: Tensor) -> Iterator[tuple[str, Tensor]]:
    sizes = [layer.num_experts for layer in operators.layers]
    for layer, counts_E in zip(operators.layers, torch.split(counts, sizes), strict=True):
        yield layer.prefix, counts_E
