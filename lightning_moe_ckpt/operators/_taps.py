"""Count the tokens each expert processes, without forking the model and without waiting for the device.

Four kinds of taps cover the supported layouts: the indices passed to a module with stacked experts, the rows passed to
each expert module, a mask or scores from the router, and a counter of the layer itself. Hooks add to an int64
accumulator on the device (`bincount` would synchronise). They run in training only, and never when backward recomputes
a forward, which would count tokens twice. `_popularity_taps` has the taps for router probabilities and capacity.

Shape suffixes: T tokens on this rank, K top-k, E all experts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

log = logging.getLogger(__name__)


def in_backward() -> bool:
    """Whether autograd runs backward on this thread, so that a forward now is a recomputation.

    `torch.is_grad_enabled()` cannot tell: non-reentrant checkpointing recomputes with gradients enabled.
    """
    return int(torch._C._current_graph_task_id()) != -1  # noqa: SLF001  # no public way; a test guards it


class TokenCounts:
    """Accumulates one layer's tokens, probabilities or capacity per expert, on the device where they arise.

    Args:
        num_experts: E, over all ranks.
        dtype: float64 for probabilities; integer sums are exact in any order.
    """

    def __init__(self, num_experts: int, dtype: torch.dtype = torch.int64) -> None:
        self.num_experts = num_experts
        # One extra element for indices that mean "dropped"; it is never read.
        self._acc = torch.zeros(num_experts + 1, dtype=dtype)
        self._seen = torch.zeros(num_experts, dtype=torch.int64)
        self._warned = self._muted = False

    def add_indices(self, idx_TK: Tensor) -> None:
        """Count each routed slot; an index outside `[0, E)` marks a dropped one."""
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
        """Remember the current value of the layer's own running count. The count itself is never changed."""
        self._seen = running_E.detach().clone()

    def add_running(self, running_E: Tensor) -> None:
        """Add the increase of a running count since the last call, or all of it if the count was reset meanwhile."""
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

    def _on(self, device: torch.device) -> Tensor:
        if self._acc.device != device:
            self._acc = self._acc.to(device)
        return self._acc


class CountTap(Protocol):
    """A way to count one layer's tokens. Holds names only; each call gets the model."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Register hooks that add to `counts`."""

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Add the layer's own counts to `counts`; called before each reading."""


@dataclass(frozen=True)
class IndexTap:
    """Counts the expert indices handed to a module with stacked experts."""

    experts: str
    """Name of that module."""
    router: str | None = None
    """Name of a module that emits the indices, for experts whose input is sorted rows and counts instead."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the experts' forward, and the router's."""
        emitted: list[Tensor | None] = [None]

        def route(router: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any], out: object) -> None:
            if router.training and not in_backward():
                emitted[0] = find_indices(out if isinstance(out, tuple | list) else [out])

        def before(experts: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not experts.training or in_backward():
                return
            chosen, emitted[0] = emitted[0], None
            idx_TK = find_indices([*args, *kwargs.values()])
            if idx_TK is None:
                idx_TK = chosen
            if idx_TK is None:
                counts.missed(self.experts, "is given no expert indices")
                return
            with torch.no_grad():
                counts.add_indices(idx_TK)

        handles = [module.get_submodule(self.experts).register_forward_pre_hook(before, with_kwargs=True)]
        if self.router is not None:
            handles.append(module.get_submodule(self.router).register_forward_hook(route, with_kwargs=True))
        return handles

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hooks have counted."""


@dataclass(frozen=True)
class RowsTap:
    """Counts the rows passed to each expert module: the tokens that it really processed."""

    experts: Mapping[int, str]
    """Names of the modules by global expert index."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook each expert's forward."""
        return [_hook_rows(module.get_submodule(fqn), expert, counts) for expert, fqn in self.experts.items()]

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hooks have counted."""


@dataclass(frozen=True)
class MaskTap:
    """Counts where a router's output is positive: a mask, or scores that are zero for experts not chosen."""

    router: str
    """Name of a module that emits `[..., E]`, alone or in a tuple."""
    output: int = 0
    """Index of that output."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the router's forward."""

        def after(router: nn.Module, _args: tuple[Any, ...], out: object) -> None:
            if not router.training or in_backward():
                return
            mask = out[self.output] if isinstance(out, tuple | list) else out
            if not isinstance(mask, Tensor) or mask.shape[-1:] != (counts.num_experts,):
                counts.missed(self.router, "emits no value per expert")
                return
            with torch.no_grad():
                counts.add_sums((mask.detach() > 0).reshape(-1, counts.num_experts).sum(0))

        return [module.get_submodule(self.router).register_forward_hook(after)]

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hook has counted."""


@dataclass(frozen=True)
class AttributeTap:
    """Reads a counter `[E]` that the layer keeps on the device, without changing it."""

    layer: str
    """Name of the module."""
    attribute: str
    """An integer tensor `[E]` that the layer adds to in training forwards only."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Exclude what was counted before."""
        counts.follow(self._counter(module))
        return []

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Add what the layer has counted since the last call."""
        counts.add_running(self._counter(module))

    def _counter(self, module: nn.Module) -> Tensor:
        counter: Tensor = getattr(module.get_submodule(self.layer), self.attribute)
        return counter


def _hook_rows(expert: nn.Module, expert_idx: int, counts: TokenCounts) -> RemovableHandle:
    def before(called: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not called.training or in_backward():
            return
        x = next((t for t in tensors_of([*args, *kwargs.values()])), None)
        if x is not None:
            # Shapes are known on the host, so this does not wait for the device.
            counts.add_rows(expert_idx, x.shape[:-1].numel(), x.device)

    return expert.register_forward_pre_hook(before, with_kwargs=True)


def find_indices(values: Sequence[object]) -> Tensor | None:
    """Return the routing indices, found by dtype and shape: their argument position changed between releases."""
    return next((t for t in tensors_of(values) if t.dtype in (torch.int64, torch.int32) and t.ndim >= 1), None)


def tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
