"""Count tokens, router probabilities or capacity per expert between two readings, and prove in one step that counts are right.

Libraries change the return values of routers from one minor version to the next, and some pass other tokens to experts than
the router chose. So taps are verified: the first training step also counts the layer's own tokens, and gradients show which
experts ran. A layer's counts are right if all of this holds:

* T tokens passed and k experts were chosen for each: the counts add up to `T * k`, dropped slots included where they
  are known, and to no more where they are not;
* every index names an expert, or says that the slot was dropped (-1, or E);
* an expert that was counted nothing has no gradient, unless it began the step with one;
* where every token's output has a gradient, experts with many tokens have one.

Shape suffixes: T tokens on this rank, E experts of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import WrongCounts
from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators._boxes import Box, boxes_of, memory_of, whole_of
from lightning_moe_ckpt.operators._count_taps import CountTap, IndexTap, TokenCounts, tensors_of
from lightning_moe_ckpt.operators._discover import discover
from lightning_moe_ckpt.operators._operator import MoELayerSpec, OperatorSet
from lightning_moe_ckpt.parallel import stepped_of

log = rank_logger(__name__)

Measure = Literal["tokens", "probabilities", "capacity"]
"""Quantity to add up by expert: tokens processed, the router's probabilities, or tokens that the expert could have taken."""


class LoadCounter:
    """Count, or another `measure`, of the tokens that this rank sends to each expert; hooks are on the model while
    installed.

    The vector of counts has one entry per expert of each layer, also for experts on other ranks, in the order of
    `OperatorSet.layers`; `OperatorSet.count_offsets` has each layer's begin. Its sum over ranks with different tokens
    is the same everywhere.
    """

    def __init__(self, operators: OperatorSet, module: nn.Module, measure: Measure = "tokens") -> None:
        self._module, self._measure = module, measure
        dtype = torch.float64 if measure == "probabilities" else torch.int64
        kind = "count" if measure == "tokens" else measure
        self._taps: list[tuple[MoELayerSpec, CountTap | None, TokenCounts]] = [
            (layer, getattr(layer, kind), TokenCounts(layer.num_experts, dtype)) for layer in operators.layers
        ]
        self._dtype = dtype
        self._handles: list[RemovableHandle] = []

    installed: ClassVar[WeakSet[LoadCounter]] = WeakSet()
    """All counters with hooks on a model."""

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Layers that cannot be measured; without token counts their experts keep a fixed order."""
        return tuple(layer.fqn for layer, tap, _ in self._taps if tap is None)

    def install(self) -> None:
        """Start counting; a second call changes nothing."""
        if self in self.installed:
            return
        self.installed.add(self)
        for _, tap, counts in self._taps:
            if tap is not None:
                self._handles += tap.install(self._module, counts)
        if self.uncounted:
            log.warning(
                "%s cannot be counted in %s; these experts are captured in a fixed order", self._measure, self.uncounted
            )

    def distrust(self, layers: Collection[str]) -> None:
        """Ignore these layers, whose counts are wrong, from the last reading on."""
        for layer, _, counts in self._taps:
            if layer.fqn in layers:
                counts.mute()

    def read_and_reset(self) -> Tensor:
        """Return the sums since the last call, `[sum of num_experts]`, without waiting for the device. Returns int64,
        or float64 for probabilities; on the layers' device, or on the CPU if they are on several.
        """
        self._drain()
        taken = [counts.take() for _, _, counts in self._taps]
        if len({c.device for c in taken}) > 1:
            taken = [c.cpu() for c in taken]
        return torch.cat(taken) if taken else torch.zeros(0, dtype=self._dtype)

    def hold(self) -> list[Callable[[], None]]:
        """Return functions to restore the present counts."""
        return [counts.hold() for _, _, counts in self._taps]

    def remove(self) -> None:
        """Stop counting and remove all hooks; the counts so far can still be read."""
        self._drain()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.installed.discard(self)

    def _drain(self) -> None:
        if self in self.installed:
            for _, tap, counts in self._taps:
                if tap is not None:
                    tap.drain(self._module, counts)


MAX_STEPS = 8
"""Steps after which a layer without any token is not checked any more; it has no counts either."""

_IDLE_SHARE = 0.05
"""Share of tokens allowed on experts without a gradient: a saturated router's weights underflow to zero."""


@dataclass(frozen=True)
class CountFailure:
    """A layer whose counts differ from the tokens that its experts process."""

    layer: str
    """Name of its block."""
    block: str
    """Name of the block's class."""
    reason: str

    def __str__(self) -> str:
        return (
            f"The tokens of `{self.layer or 'root'}` ({self.block}) are not counted as its experts process them: "
            f"{self.reason}. Describe the layer with `register_adapter({self.block}, factory)`, where the `count` of "
            "its `MoELayerSpec` sees what experts are given."
        )


class CountProbe:
    """Watch over a model's layers until a step has shown whether their tokens are counted correctly.

    Call `install` before a batch, and `check` after backward, before the optimizer steps and gradients are cleared. All
    micro-batches of a step lie in between. The probe changes no value and draws no random number.
    """

    def __init__(self, operators: OperatorSet, module: nn.Module) -> None:
        self._module = module
        params = {fqn: stepped_of(param) for fqn, param in module.named_parameters(remove_duplicate=False)}
        boxes = boxes_of(params)
        counted = [layer for layer in operators.layers if layer.count is not None]
        self._layers = [_LayerProbe(layer, module, params, boxes) for layer in counted]
        self._handles: list[RemovableHandle] = []
        self._steps = 0

    @property
    def done(self) -> bool:
        """Whether every layer was judged, or not used in the first `MAX_STEPS` steps."""
        return self._steps >= MAX_STEPS or not any(probe.pending for probe in self._layers)

    def install(self) -> None:
        """Start watching; a second call changes nothing."""
        if not self._handles:
            self._handles = [handle for probe in self._layers for handle in probe.install()]

    def check(self, total: Callable[[Tensor], Tensor] | None = None) -> list[CountFailure]:
        """Return layers with wrong counts, judged with their tokens since `install`, as found on this rank. Waits for the device.

        Of several ranks, `total` sums an int64 vector on the CPU over all, and is called once on each.
        """
        seen = torch.cat([each.take() for each in self._layers]) if self._layers else torch.zeros(0, dtype=torch.int64)
        totals = seen if total is None else total(seen)
        self._steps += 1
        failures, start = [], 0
        for probe in self._layers:
            stop = start + probe.width
            if (reason := probe.judge(seen[start:stop], totals[start:stop])) is not None:
                block = type(self._module.get_submodule(probe.layer.fqn)).__name__
                failures.append(CountFailure(probe.layer.fqn, block, reason))
            start = stop
        if self.done:
            self.remove()
        return failures

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def prove_counts(module: nn.Module, step: Callable[[], object], operators: OperatorSet | None = None) -> None:
    """Prove with one step of a model in training mode that experts process the counted tokens. `step` runs forward and
    backward on a batch, but no optimizer. Raises `WrongCounts` if counts are wrong, or a layer got no token; the
    message names the layer and the reason.
    """
    probe = CountProbe(operators if operators is not None else discover(module), module)
    module.zero_grad()
    probe.install()
    try:
        step()
        failures = probe.check()
    finally:
        probe.remove()
    if failures:
        raise WrongCounts(" ".join(map(str, failures)))
    if not probe.done:
        raise WrongCounts("No token has passed some MoE layer in training. Call `module.train()`, or use more data.")


class _Watched(TokenCounts):
    """Token counts with a count of indices outside the experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts)
        self.top_k: int | None = None
        self.dropped = self.outside = 0

    @override
    def add_indices(self, idx_TK: Tensor) -> None:
        super().add_indices(idx_TK)
        if idx_TK.ndim > 1:
            self.top_k = idx_TK.shape[-1]
        dropped = int(((idx_TK == -1) | (idx_TK == self.num_experts)).sum())
        self.dropped += dropped
        self.outside += int(((idx_TK < 0) | (idx_TK >= self.num_experts)).sum()) - dropped


class _LayerProbe:
    """A layer with its tap and the evidence to compare the counts with."""

    def __init__(
        self, layer: MoELayerSpec, module: nn.Module, params: Mapping[str, Tensor], boxes: Mapping[str, Box]
    ) -> None:
        self.layer, self._module, self._params, self._boxes = layer, module, params, boxes
        self.pending = True
        self._counts = _Watched(layer.num_experts)
        self._drops = TokenCounts(layer.num_experts)
        self._tokens = 0
        self._silent_rows: list[Tensor] = []
        self._kept: set[int] = set()
        """Experts with a gradient of an earlier step, which proves nothing about tokens of the present step."""

    @property
    def width(self) -> int:
        """Length of the vector that `take` returns."""
        return self.layer.num_experts + 4

    def install(self) -> list[RemovableHandle]:
        assert self.layer.count is not None
        self._kept = self._moved()
        block = self._module.get_submodule(self.layer.fqn)
        handles = self.layer.count.install(self._module, self._counts)
        if self.layer.dropped is not None:
            handles += self.layer.dropped.install(self._module, self._drops)
        handles.append(block.register_forward_pre_hook(self._before, with_kwargs=True))
        handles.append(block.register_forward_hook(self._after))
        return handles

    def take(self) -> Tensor:
        """Return and reset: counts per expert, tokens, dropped slots, indices outside, output rows without gradient."""
        assert self.layer.count is not None
        self.layer.count.drain(self._module, self._counts)
        if self.layer.dropped is not None:
            self.layer.dropped.drain(self._module, self._drops)
        dropped = self._counts.dropped + int(self._drops.take().sum())
        silent = sum(int(rows) for rows in self._silent_rows) if self._silent_rows else 1
        others = torch.tensor([self._tokens, dropped, self._counts.outside, silent])
        self._tokens = self._counts.dropped = self._counts.outside = 0
        self._silent_rows.clear()
        return torch.cat([self._counts.take().cpu(), others])

    def judge(self, seen: Tensor, totals: Tensor) -> str | None:
        """Return why the counts are wrong, or `None`; `seen` comes from `take`, `totals` is its sum over ranks."""
        counts_E, (tokens, dropped, outside, silent) = seen[:-4], seen[-4:].tolist()
        if not self.pending or not (int(totals[-4]) or totals[:-4].any()):
            return None
        self.pending = False
        if not int(totals[-4]):  # the block itself is never called: a LightningModule that is a block
            return self._wrong_gradients(counts_E, totals[:-4], strict=False)
        return self._wrong_sum(int(counts_E.sum()), tokens, dropped, outside) or self._wrong_gradients(
            counts_E, totals[:-4], strict=silent == 0
        )

    def _wrong_sum(self, counted: int, tokens: int, dropped: int, outside: int) -> str | None:
        if outside:
            return f"{outside} indices are outside `[0, {self.layer.num_experts})`"
        if tokens and not counted + dropped:
            return f"{tokens} tokens passed and none was counted"
        top_k = self.layer.top_k or self._counts.top_k
        routed = counted + dropped
        drops_known = isinstance(self.layer.count, IndexTap) or self.layer.dropped is not None
        most = tokens * (top_k or self.layer.num_experts)
        if routed > most or (drops_known and (routed != most if top_k else routed % max(tokens, 1))):
            how = f"{tokens} tokens with top-{top_k}" if top_k else f"{tokens} tokens"
            return f"{routed} were counted, where {how} passed" + (
                f" and {dropped} slots were dropped" if dropped else ""
            )
        return None

    def _wrong_gradients(self, counts_E: Tensor, totals_E: Tensor, *, strict: bool) -> str | None:
        if not (moved := self._moved()):
            return None  # frozen, or no backward
        if unseen := [expert for expert in sorted(moved - self._kept) if not totals_E[expert]]:
            return f"experts {unseen} have a gradient, and no token was counted for them"
        still = [expert for expert in self.layer.local_expert_ids if expert not in moved and counts_E[expert]]
        slices, params = self.layer.experts, self._params
        idle = [e for e in still if any(whole_of(params[piece.fqn]).requires_grad for piece in slices[e])]
        # Experts of this rank also get tokens of other ranks, whose gradients may be missing for other reasons.
        # So do experts of which other ranks hold the rows.
        whole = self.layer.holders == "stage" and not self._boxes
        if strict and whole and counts_E[idle].sum() > _IDLE_SHARE * counts_E.sum():
            return f"experts {idle} have no gradient, and {int(counts_E[idle].sum())} tokens were counted for them"
        return None

    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if block.training and not in_backward():
            x = next((t for t in tensors_of([*args, *kwargs.values()]) if t.is_floating_point()), None)
            self._tokens += 0 if x is None else x.shape[:-1].numel()

    def _after(self, block: nn.Module, _args: tuple[Any, ...], out: object) -> None:
        y = next(tensors_of(out if isinstance(out, tuple | list) else [out]), None)
        # Also in recomputation: with reentrant checkpointing only that forward has a graph.
        if block.training and y is not None and y.requires_grad and not torch.compiler.is_compiling():
            y.register_hook(self._look)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _moved(self) -> set[int]:
        return {expert for expert in self.layer.local_expert_ids if self._has_gradient(expert)}

    def _has_gradient(self, expert: int) -> bool:
        for piece in self.layer.experts[expert]:
            grad, start, stop = self._params[piece.fqn].grad, piece.start, piece.stop
            if piece.fqn in self._boxes and grad is not None:
                grad, (start, stop, _) = memory_of(grad), self._boxes[piece.fqn].part(start, stop) or (0, 0, 0)
            if grad is not None and bool(grad.reshape(-1)[start:stop].any()):
                return True
        return False

    def _look(self, grad: Tensor) -> None:
        if not self._silent_rows:  # the first backward pass of the step, which has not come to the experts yet
            self._kept = self._moved()
        self._silent_rows.append((grad.detach() == 0).all(dim=-1).sum())
