"""Count what each expert processes, without forking the model and without waiting for the device.

Taps for tokens cover the supported layouts: the indices passed to a module with stacked experts or emitted by a router,
the rows passed to each expert module, a mask or scores from the router, a counter of the layer itself, and the demand
that a gate with a capacity reports. Taps for popularity sum the router's probabilities (soft counts) and the tokens
that experts could take.

Taps are hooks that add to an int64 accumulator on the device (`bincount` would synchronise). They run in training only,
and never when backward recomputes a forward, which would count tokens twice. They draw no random numbers and keep
nothing of the graph.

Shape suffixes: T tokens on this rank, K top-k, S slots (T * K), E all experts.

Source: MoEvement (2026), Appendix B (popularity).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.moe._layer import in_backward

log = rank_logger(__name__)


class TokenCounts:
    """Sums of a layer's tokens, probabilities (float64) or capacity per expert, all `num_experts`, on the device where they arise."""

    def __init__(self, num_experts: int, dtype: torch.dtype = torch.int64) -> None:
        self.num_experts = num_experts
        # One extra element for indices that mean "dropped"; it is never read.
        self._acc = torch.zeros(num_experts + 1, dtype=dtype)
        self._seen = torch.zeros(num_experts, dtype=torch.int64)
        self._warned = self._muted = False

    def add_indices(self, idx_TK: Tensor) -> None:
        """Count each routed slot; an index outside `[0, E)` marks a dropped slot."""
        idx = idx_TK.detach().reshape(-1).to(torch.int64)
        idx = torch.where((idx >= 0) & (idx < self.num_experts), idx, self.num_experts)
        self._on(idx.device).scatter_add_(0, idx, torch.ones_like(idx))

    def add_rows(self, expert_idx: int, rows: int, device: torch.device) -> None:
        """Count `rows` tokens for one expert."""
        self._on(device)[expert_idx].add_(rows)

    def add_sums(self, sums_E: Tensor) -> None:
        """Add one value per expert, already summed over tokens."""
        self._on(sums_E.device)[: self.num_experts].add_(sums_E)

    def follow(self, running_E: Tensor) -> None:
        """Remember the present value of the layer's own running count, never changed."""
        self._seen = running_E.detach().clone()

    def add_running(self, running_E: Tensor) -> None:
        """Add the increase of a running count since the last call; the whole count if it was reset meanwhile."""
        seen, now = self._seen.to(running_E.device), running_E.detach().clone()
        self._on(now.device)[: self.num_experts].add_(torch.where(now >= seen, now - seen, now))
        self._seen = now

    def missed(self, name: str, why: str) -> None:
        """Warn once that tokens pass through module `name` uncounted."""
        if not self._warned:
            self._warned = True
            log.warning("`%s` %s: its tokens cannot be counted, its experts keep their order", name, why)

    def mute(self) -> None:
        """Return zeros from `take` from now on."""
        self._muted = True

    def take(self) -> Tensor:
        """Return the counts since the last call, `[E]` on the device, and reset them."""
        counts = self._acc[: self.num_experts].clone()
        if self._muted:
            counts.zero_()
        self._acc.zero_()
        return counts

    def hold(self) -> Callable[[], None]:
        """Return a function to restore the present counts."""
        kept = self._acc.clone()
        return lambda: setattr(self, "_acc", kept.clone())

    def _on(self, device: torch.device) -> Tensor:
        if self._acc.device != device:
            self._acc = self._acc.to(device)
        return self._acc


class CountTap(Protocol):
    """Way to count one layer's tokens. Holds names only; each call gets the model."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Register hooks that add to `counts`."""

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Add the layer's own counts to `counts`; called before each reading."""


class HookTap:
    """A tap whose hooks do all the counting."""

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class IndexTap(HookTap):
    """Counts the expert indices handed to a module with stacked experts."""

    experts: str
    """Name of that module."""
    router: str | None = None
    """Name of a module that emits the indices, for experts whose input is sorted rows and counts instead."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        emitted: list[Tensor | None] = [None]

        def route(out: object) -> None:
            emitted[0] = find_indices(_outputs(out))

        def before(inputs: Sequence[object]) -> None:
            chosen, emitted[0] = emitted[0], None
            if (idx_TK := find_indices(inputs)) is None:
                idx_TK = chosen
            if idx_TK is None:
                counts.missed(self.experts, "is given no expert indices")
                return
            with torch.no_grad():
                counts.add_indices(idx_TK)

        handles = [_on_inputs(module, self.experts, before)]
        if self.router is not None:
            handles.append(_on_output(module, self.router, route))
        return handles


@dataclass(frozen=True)
class RowsTap(HookTap):
    """Counts the rows passed to each expert module: tokens processed."""

    experts: Mapping[int, str]
    """Names of the modules by global expert index."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        def count(expert: int, inputs: Sequence[object]) -> None:
            if (x := next(tensors_of(inputs), None)) is not None:
                # Shapes are known on the host, so this does not wait for the device.
                counts.add_rows(expert, x.shape[:-1].numel(), x.device)

        return [_on_inputs(module, fqn, partial(count, expert)) for expert, fqn in self.experts.items()]


@dataclass(frozen=True)
class MaskTap(HookTap):
    """Counts the positive values in a router's output: a mask, or scores with zeros for experts not chosen."""

    router: str
    """Name of a module that emits `[..., E]`, alone or in a tuple."""
    output: int = 0
    """Index of that output."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        def after(out: object) -> None:
            mask = out[self.output] if isinstance(out, tuple | list) else out
            if not isinstance(mask, Tensor) or mask.shape[-1:] != (counts.num_experts,):
                counts.missed(self.router, "emits no value per expert")
                return
            with torch.no_grad():
                counts.add_sums((mask.detach() > 0).reshape(-1, counts.num_experts).sum(0))

        return [_on_output(module, self.router, after)]


@dataclass(frozen=True)
class AttributeTap:
    """Reads a counter `[E]` that the layer keeps on the device, without changing it."""

    layer: str
    """Name of the module."""
    attribute: str
    """An integer tensor `[E]` that the layer adds to in training forwards only."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Leave out the tokens counted before."""
        counts.follow(self._counter(module))
        return []

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Add the layer's counts since the last call."""
        counts.add_running(self._counter(module))

    def _counter(self, module: nn.Module) -> Tensor:
        counter: Tensor = getattr(module.get_submodule(self.layer), self.attribute)
        return counter


# -- layers with a capacity --------------------------------------------------------------------------------------------

Share = Literal["processed", "dropped", "capacity"]

Demand = tuple[Tensor, "Tensor | int | None"]
"""Tokens that chose each expert, `[E]`, and the capacity of an expert; `None` if it takes all."""


def add_share(counts: TokenCounts, share: Share, demand: Demand) -> None:
    """Add one share of a forward's demand to `counts`, without waiting for the device."""
    with torch.no_grad():
        demand_E, capacity = demand[0].detach().to(torch.int64), demand[1]
        if capacity is None:
            capacity = demand_E.sum()
        limit = torch.as_tensor(capacity, dtype=torch.int64, device=demand_E.device)
        kept_E = torch.minimum(demand_E, limit)
        counts.add_sums(
            {"processed": kept_E, "dropped": demand_E - kept_E, "capacity": limit.expand(len(kept_E))}[share]
        )


@dataclass(frozen=True)
class DemandTap(HookTap):
    """Adds up one share of the demand and capacity in a gate's output."""

    gate: str
    """Name of the module."""
    read: Callable[[Any], Demand]
    """Extracts both from the output."""
    share: Share = "processed"

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        return [_on_output(module, self.gate, lambda out: add_share(counts, self.share, self.read(out)))]


@dataclass(frozen=True)
class ChoiceTap(HookTap):
    """Counts the expert indices from a router; an index outside `[0, E)` marks a dropped token."""

    router: str
    """Name of the module."""
    limit: str | None = None
    """Name of a module whose `expert_capacity(num_tokens)` returns an expert's capacity; zero means no limit."""
    share: Share = "processed"

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        limiting: Any = None if self.limit is None else module.get_submodule(self.limit)

        def after(out: Any) -> None:
            if (idx_TK := find_indices(out)) is None:
                counts.missed(self.router, "emits no expert indices")
            elif limiting is None:
                with torch.no_grad():
                    counts.add_indices(idx_TK)
            else:
                idx_S = idx_TK.detach().reshape(-1).to(torch.int64)
                demand_E = torch.zeros(counts.num_experts, dtype=torch.int64, device=idx_S.device)
                demand_E.scatter_add_(0, idx_S, torch.ones_like(idx_S))
                capacity = int(limiting.expert_capacity(idx_TK.shape[0]))
                add_share(counts, self.share, (demand_E, capacity or None))

        return [_on_output(module, self.router, after)]


# -- popularity ------------------------------------------------------------------------------------------------------

Score = Literal["auto", "none", "softmax", "sigmoid"]
"""Function from a router's output to probabilities; `none` if the output is probabilities already."""

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": lambda x: x.sigmoid(),
}


@dataclass(frozen=True)
class ProbabilityTap(HookTap):
    """Sums the router's probabilities of every expert, chosen or not."""

    router: str
    """Name of a module that emits `[..., E]`, alone or among other outputs."""
    score: Score = "auto"
    """`auto` decides at the first training forward: by the values, then by the weights of the chosen experts if the
    router returns them, else softmax."""
    output: int | None = None
    """Index of the output with the values; `None` for the first that has a value per expert."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        scores = [] if self.score == "auto" else [_SCORES[self.score]]

        def after(out: object) -> None:
            outputs = _outputs(out)
            emitted = list(tensors_of(outputs))
            candidates = emitted if self.output is None else tensors_of([outputs[self.output]])
            values_TE = next(
                (t for t in candidates if t.is_floating_point() and t.shape[-1:] == (counts.num_experts,)), None
            )
            if values_TE is None:
                counts.missed(self.router, "emits no value per expert")
                return
            with torch.no_grad(), torch.autocast(values_TE.device.type, enabled=False):
                values_TE = values_TE.detach().reshape(-1, counts.num_experts).float()
                if not scores:
                    scores.append(_SCORES[find_score(values_TE, emitted)])
                # In float64, because in bf16 a sum over thousands of tokens stops growing.
                counts.add_sums(scores[0](values_TE).sum(dim=0, dtype=torch.float64))

        return [_on_output(module, self.router, after)]


@dataclass(frozen=True)
class CapacityTap(HookTap):
    """Sums the tokens that each expert could take: the layer's `capacity`, or all tokens in a layer without drops."""

    module: str
    """Name of a module whose input has one row per token, `[..., D]`. Its method `capacity(num_tokens)`, if any,
    returns a number, a tensor `[E]`, or `None` for all tokens."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        called = module.get_submodule(self.module)

        def before(inputs: Sequence[object]) -> None:
            if (x := next(tensors_of(inputs), None)) is not None:
                counts.add_sums(_capacity(called, x.shape[:-1].numel(), counts.num_experts))

        return [_on_inputs(module, self.module, before)]


def find_score(values_TE: Tensor, emitted: Sequence[Tensor]) -> str:
    """Return the function from a router's output, one value per expert, to probabilities. Waits for the device. If
    weights and indices `[T, K]` of the chosen experts are among the outputs `emitted`, that function explains the
    weights.
    """
    if bool((values_TE >= 0).all()) and torch.allclose(values_TE.sum(-1), values_TE.new_ones(()), atol=1e-2):
        return "none"
    chosen, num_experts = find_indices(emitted), values_TE.shape[-1]
    if chosen is None or chosen.shape[-1] == num_experts or int(chosen.max()) >= num_experts:
        return "softmax"  # a mask over all experts, if anything
    weight_TK = next((t for t in emitted if t.is_floating_point() and t.shape == chosen.shape), None)
    if weight_TK is None:
        return "softmax"
    weight_TK, idx_TK = weight_TK.detach().float(), chosen.to(torch.int64)
    errors = {name: _unlike(_SCORES[name](values_TE).gather(-1, idx_TK), weight_TK) for name in ("softmax", "sigmoid")}
    return min(errors, key=errors.__getitem__)


def _unlike(score_TK: Tensor, weight_TK: Tensor) -> float:
    """Return the distance of the weights from the scores times one factor, or times one factor per token."""
    factor_TK = weight_TK / score_TK.clamp(min=torch.finfo(torch.float32).tiny)
    scaled = float((factor_TK / factor_TK.mean() - 1).abs().mean())
    if score_TK.shape[-1] == 1:
        return scaled  # a factor per token would explain anything
    return min(scaled, float((factor_TK / factor_TK.mean(-1, keepdim=True) - 1).abs().mean()))


def _capacity(module: nn.Module, num_tokens: int, num_experts: int) -> Tensor:
    ask = getattr(module, "capacity", None)
    answer = ask(num_tokens) if callable(ask) else None
    if isinstance(answer, Tensor):
        return answer.detach()
    return torch.full((num_experts,), num_tokens if answer is None else int(answer), dtype=torch.int64)


# -- hooks -----------------------------------------------------------------------------------------------------------


def _on_inputs(module: nn.Module, fqn: str, see: Callable[[Sequence[object]], None]) -> RemovableHandle:
    """Call `see` with the arguments of every training forward of the module `fqn`, recomputations excluded."""

    def before(called: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if called.training and not in_backward():
            see([*args, *kwargs.values()])

    return module.get_submodule(fqn).register_forward_pre_hook(before, with_kwargs=True)


def _on_output(module: nn.Module, fqn: str, see: Callable[[Any], None]) -> RemovableHandle:
    """Call `see` with the output of every training forward of the module `fqn`, recomputations excluded."""

    def after(called: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        if called.training and not in_backward():
            see(out)

    return module.get_submodule(fqn).register_forward_hook(after)


def _outputs(out: object) -> Sequence[object]:
    return out if isinstance(out, tuple | list) else [out]


def find_indices(values: Sequence[object]) -> Tensor | None:
    """Return the routing indices, found by dtype and shape: their argument position changed between releases."""
    return next((t for t in tensors_of(values) if t.dtype in (torch.int64, torch.int32) and t.ndim >= 1), None)


def tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
