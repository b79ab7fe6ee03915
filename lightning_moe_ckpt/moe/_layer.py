"""A Mixture-of-Experts feed-forward layer in plain PyTorch, with Tutel's notions.

Top-k gate, capacity factor, `l_aux`, experts as stacked tensors (dim 0 is the expert) and, under `MoEStrategy`,
sharded over the ranks of the `expert` group. The group is looked up when it is used, so the layer can be copied and
pickled. Every operation is deterministic on CPU, and on CUDA no result depends on atomics.

Invariant: the initial weights of expert `e` and of the gate depend on the global random state alone, not on how many
ranks share the experts, and construction draws from it once. (All ranks must be seeded alike.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe._dispatch import (
    Routing,
    apply_everywhere,
    combine_rows,
    expert_group,
    gather_rows,
    plan_dispatch,
    route,
)
from lightning_moe_ckpt.parallel import current_groups

# Shape suffixes: T tokens on this rank, K top-k, E all experts, e experts on this rank (E / ep_size), N slots sent,
# M rows received, D model dim, F FFN hidden dim.

Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Activation] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}


def in_backward() -> bool:
    """Whether autograd runs backward on this thread, so that a forward now is a recomputation.

    `torch.is_grad_enabled()` cannot tell: non-reentrant checkpointing recomputes with gradients enabled.
    """
    return int(torch._C._current_graph_task_id()) != -1  # noqa: SLF001  # no public way; a test guards it


class _TokenCounter:
    """Running counts of this rank's slots per global expert: `processed` by the expert, or `dropped` over capacity.

    Plain tensors, not buffers: a module's buffers are broadcast from rank 0 by DistributedDataParallel, and counts
    differ between ranks.
    """

    def __init__(self, num_experts: int) -> None:
        self.processed = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        self.dropped = torch.zeros(num_experts, dtype=torch.int64, device="cpu")

    def add(self, kept_E: Tensor, routed_E: Tensor) -> None:
        """Add the counts of one forward; the first call moves the counters to their device."""
        if self.processed.device != kept_E.device:
            self.processed, self.dropped = self.processed.to(kept_E.device), self.dropped.to(kept_E.device)
        self.processed += kept_E
        self.dropped += routed_E - kept_E

    @staticmethod
    def take(count_E: Tensor) -> Tensor:
        """Return a copy of a count and reset it to zero."""
        taken = count_E.clone()
        count_E.zero_()
        return taken


class MoELayer(nn.Module):
    """Routes every token to `top_k` of `num_experts` two-layer perceptrons and adds their weighted outputs.

    Input and output have shape `[..., d_model]`. After a forward `l_aux` holds the balancing loss over this rank's
    tokens; add it to the loss, times a small factor.

    Args:
        d_model: D.
        d_hidden: F.
        num_experts: E, over all ranks; a multiple of the expert-parallel size.
        top_k: experts per token.
        capacity_factor: an expert takes at most `ceil(top_k * capacity_factor * T / E)` tokens of one rank per
            forward and drops the rest, last choices and last tokens first. Zero drops none. A sequence has one factor
            above zero per expert. It is read at every forward and must be equal on all ranks.
        noisy_gate: add `N(0, 1) / E` to the logits in training.
        gate_fp32: compute the gate in fp32 under autocast and with 16-bit parameters.
        activation: `"gelu"`, `"relu"`, `"silu"`, `"tanh"`, or any function of a tensor.
        bias: whether experts have biases.
        normalize_gate: whether the weights of a token's experts sum to one, for `top_k` > 1.

    Attributes:
        num_experts: E, whatever the sharding.
        num_local_experts: e.
        ep_size: ranks that share the experts, as of construction.
        local_expert_ids: global indices of the experts held here, in the order of dim 0.
        l_aux: balancing loss of the last forward, `None` before.
        tokens_per_expert: see `read_and_reset_counts`.
        drops_per_expert: see `read_and_reset_drops`.
        probabilities: module called with the gate's probabilities `[T, E]`, detached, at every forward; for hooks.

    Raises:
        ConfigurationError: the arguments contradict each other or the number of expert-parallel ranks.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        *,
        top_k: int = 2,
        capacity_factor: float | Sequence[float] = 0.0,
        noisy_gate: bool = False,
        gate_fp32: bool = False,
        activation: str | Activation = "gelu",
        bias: bool = True,
        normalize_gate: bool = True,
    ) -> None:
        super().__init__()
        groups = current_groups()
        _check(num_experts=num_experts, top_k=top_k, capacity_factor=capacity_factor, ep_size=groups.ep_size)
        if not callable(activation) and activation not in _ACTIVATIONS:
            raise ConfigurationError(f"`MoELayer(activation={activation!r})` must be one of {sorted(_ACTIVATIONS)}.")
        self.d_model, self.d_hidden, self.num_experts, self.top_k = d_model, d_hidden, num_experts, top_k
        self.capacity_factor, self.noisy_gate, self.gate_fp32 = capacity_factor, noisy_gate, gate_fp32
        self.normalize_gate = normalize_gate
        self.activation = activation if callable(activation) else _ACTIVATIONS[activation]
        self.ep_size = groups.ep_size
        self.num_local_experts = num_experts // groups.ep_size
        first = groups.ep_rank * self.num_local_experts
        self.local_expert_ids = range(first, first + self.num_local_experts)
        self.l_aux: Tensor | None = None
        self._counter = _TokenCounter(num_experts)
        self.probabilities = nn.Identity()

        # Straight to memory without `nn.Linear`'s own draws from the global random state.
        gate = nn.Linear(d_model, num_experts, bias=False, device="meta")
        self.gate = gate.to_empty(device=torch.get_default_device())
        self.w1 = nn.Parameter(torch.empty(self.num_local_experts, d_model, d_hidden))
        self.b1 = nn.Parameter(torch.empty(self.num_local_experts, d_hidden)) if bias else None
        self.w2 = nn.Parameter(torch.empty(self.num_local_experts, d_hidden, d_model))
        self.b2 = nn.Parameter(torch.empty(self.num_local_experts, d_model)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Mix experts into every token.

        Args:
            x: shape `[..., D]`; ranks may hold different numbers of tokens, but all call forward equally often.

        Returns:
            Same shape and dtype.
        """
        x_TD = x.reshape(-1, self.d_model)
        routing = self._route(x_TD)
        self.l_aux = routing.l_aux
        self.probabilities(routing.probs.detach())
        dispatch = plan_dispatch(routing.topk_idx, self.num_experts, self.capacity(x_TD.shape[0]))
        if self.training and not in_backward():
            self._counter.add(dispatch.kept, dispatch.routed)
        rows_ND = gather_rows(x_TD, dispatch.slots, self.top_k)
        y_ND = apply_everywhere(rows_ND, dispatch.kept, expert_group(self), self._experts)
        return combine_rows(y_ND, dispatch.slots, routing.weight).to(x.dtype).view_as(x)

    def capacity(self, num_tokens: int) -> int | Tensor | None:
        """Return the slots per expert that `num_tokens` tokens of one rank may fill.

        One number for all experts, or int64 `[E]` on the gate's device; `None` for no limit.
        """
        if isinstance(self.capacity_factor, Sequence):
            return torch.tensor(
                [self._slots(f, num_tokens) for f in self.capacity_factor], device=self.gate.weight.device
            )
        return None if self.capacity_factor == 0 else self._slots(self.capacity_factor, num_tokens)

    def _slots(self, factor: float, num_tokens: int) -> int:
        return math.ceil(self.top_k * factor * num_tokens / self.num_experts)

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def tokens_per_expert(self) -> Tensor:
        """int64 `[E]`: slots of this rank's tokens that reached each expert in training forwards, since last read."""
        return self._counter.processed

    @property
    def drops_per_expert(self) -> Tensor:
        """int64 `[E]`: slots of this rank's tokens dropped over capacity, counted like `tokens_per_expert`."""
        return self._counter.dropped

    def read_and_reset_counts(self) -> Tensor:
        """Take `tokens_per_expert`: what experts processed, dropped slots excluded, not reduced over ranks.

        Returns:
            int64 `[E]`, on the tokens' device. Each training forward counts once, a forward that activation
            checkpointing repeats does not, evaluation does not.
        """
        return self._counter.take(self._counter.processed)

    def read_and_reset_drops(self) -> Tensor:
        """Take `drops_per_expert` like `read_and_reset_counts`; the sum of both is what the gate chose."""
        return self._counter.take(self._counter.dropped)

    # -- parameters by role ------------------------------------------------------------------------------------------

    def expert_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield stacked parameters (dim 0 is this rank's experts) with their names in this module."""
        for name in ("w1", "b1", "w2", "b2"):
            if (parameter := getattr(self, name)) is not None:
                yield name, parameter

    def expert_parallel_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield `expert_parameters` if other ranks hold other experts, else nothing."""
        if self.ep_size > 1:
            yield from self.expert_parameters()

    def router_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the gate's parameters, which are replicated on all ranks."""
        for name, parameter in self.gate.named_parameters():
            yield f"gate.{name}", parameter

    def reset_parameters(self) -> None:
        """Draw new weights, uniform in `+-1/sqrt(fan_in)`; one draw from the global random state."""
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
        seed_E = torch.randint(2**62, (self.num_experts,), generator=generator, device="cpu").tolist()
        with torch.no_grad():
            _fill(self.gate.weight, self.d_model, generator)
            for local_expert_idx, expert_idx in enumerate(self.local_expert_ids):
                generator.manual_seed(seed_E[expert_idx])
                for name, parameter in self.expert_parameters():
                    fan_in = self.d_model if name.endswith("1") else self.d_hidden
                    _fill(parameter[local_expert_idx], fan_in, generator)

    def extra_repr(self) -> str:
        """Return the arguments, for `print(model)`."""
        return (
            f"{self.d_model}, {self.d_hidden}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"capacity_factor={self.capacity_factor}, local_expert_ids={self.local_expert_ids}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # `l_aux` carries a graph, which neither copies nor pickles (averaging callbacks copy models in training).
        return {**self.__dict__, "l_aux": None}

    # -- one forward -------------------------------------------------------------------------------------------------

    def _route(self, x_TD: Tensor) -> Routing:
        if self.gate_fp32:
            with torch.autocast(x_TD.device.type, enabled=False):
                logits_TE = F.linear(x_TD.float(), self.gate.weight.float())
        else:
            logits_TE = self.gate(x_TD)
        noise = None
        if self.noisy_gate and self.training:
            noise = torch.randn_like(logits_TE, dtype=torch.float32) / self.num_experts
        return route(logits_TE, self.top_k, normalize=self.normalize_gate, noise=noise)

    def _experts(self, rows_MD: Tensor, per_expert: list[int]) -> Tensor:
        """Apply each local expert to its rows, which are sorted by expert."""
        # `unbind` and not indexing: its backward stacks the slices once, and fills in zeros for an expert without
        # rows, so a stacked parameter always gets a gradient. Empty slices stay in the loop for the same reason.
        w1, w2 = self.w1.unbind(), self.w2.unbind()
        b1 = self.b1.unbind() if self.b1 is not None else None
        b2 = self.b2.unbind() if self.b2 is not None else None
        y = []
        for j, x_MD in enumerate(torch.split(rows_MD, per_expert)):
            h_MF = self.activation(_affine(x_MD, w1[j], b1[j] if b1 else None))
            y.append(_affine(h_MF, w2[j], b2[j] if b2 else None))
        return torch.cat(y)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _fill(parameter: Tensor, fan_in: int, generator: torch.Generator) -> None:
    if parameter.is_meta:
        return
    bound = 1 / math.sqrt(fan_in)
    # Drawn in fp32 on the CPU whatever the device and dtype, so that they do not change which numbers come.
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    parameter.copy_(drawn.uniform_(-bound, bound, generator=generator))


def _check(*, num_experts: int, top_k: int, capacity_factor: float | Sequence[float], ep_size: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ConfigurationError(f"`MoELayer(top_k={top_k})` must be between 1 and `num_experts={num_experts}`.")
    if isinstance(capacity_factor, Sequence):
        if len(capacity_factor) != num_experts or min(capacity_factor) <= 0:
            raise ConfigurationError(
                f"`MoELayer(capacity_factor={capacity_factor})` must have one factor above zero for each of "
                f"{num_experts} experts, or be one number for all of them."
            )
    elif capacity_factor < 0:
        raise ConfigurationError(
            f"`MoELayer(capacity_factor={capacity_factor})` must be zero (nothing is dropped) or positive."
        )
    if num_experts % ep_size:
        raise ConfigurationError(
            f"`MoELayer(num_experts={num_experts})` cannot be shared by `expert_parallel={ep_size}` ranks. "
            "Choose a multiple of the number of ranks."
        )
