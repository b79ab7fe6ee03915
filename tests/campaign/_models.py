"""Tiny Mixture-of-Experts models, one for each way in which a layout can be awkward."""

# Shape suffixes: B sequences, S places, T = B * S tokens, E experts, D model dim, V vocabulary.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from campaign._data import SEQUENCE, VOCABULARY

MODEL_DIM = 16
NUM_EXPERTS = 4
NEVER_ROUTED = 3
"""Index of the expert that gets no token in models with `never_routed`."""


class ListMoE(nn.Module):
    """Experts in a ModuleList, top-1, skipped when they get no token: their gradient is then `None`."""

    def __init__(
        self,
        num_experts: int = NUM_EXPERTS,
        *,
        dropout: float,
        gate_fp32: bool,
        noisy: bool,
        never_routed: bool,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(MODEL_DIM, num_experts, bias=False)
        self.experts = nn.ModuleList(_expert(dropout) for _ in range(num_experts))
        self.shared_expert = _expert(dropout) if shared else None
        self._gate_fp32, self._noisy, self._never_routed = gate_fp32, noisy, never_routed

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        probs_TE = self._logits(x_TD).float().softmax(-1)
        weight_T, expert_T = self._choose(probs_TE)
        out_TD = torch.zeros_like(x_TD)
        for index, expert in enumerate(self.experts):
            rows = (expert_T == index).nonzero(as_tuple=True)[0]
            if rows.numel():
                y = expert(x_TD[rows])
                out_TD = out_TD.index_add(0, rows, (y * weight_T[rows, None].to(y.dtype)).to(out_TD.dtype))
        if self.shared_expert is not None:
            out_TD = out_TD + self.shared_expert(x_TD).to(out_TD.dtype)
        load_E = functional.one_hot(expert_T, len(self.experts)).float().mean(0)
        return out_TD, (load_E * probs_TE.mean(0)).sum() * len(self.experts)

    def _choose(self, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        weight_T, expert_T = probs_TE.max(-1)
        return weight_T, expert_T

    def _logits(self, x_TD: Tensor) -> Tensor:
        if self._gate_fp32:
            with torch.autocast("cpu", enabled=False):
                logits_TE = functional.linear(x_TD.float(), self.gate.weight.float())
        else:
            logits_TE = self.gate(x_TD)
        if self._noisy and self.training:
            logits_TE = logits_TE + 0.3 * torch.randn_like(logits_TE)
        return _block_last_expert(self.gate, (), logits_TE) if self._never_routed else logits_TE


class BiasedMoE(ListMoE):
    """Chooses experts by a bias that no gradient moves: the user does, after each batch, by the load that was seen.

    Source: DeepSeek-V3 (2024), Sec. 2.1.2 (balancing without an auxiliary loss).
    """

    SPEED = 0.02
    bias: Tensor
    load: Tensor

    def __init__(self, num_experts: int = NUM_EXPERTS, *, bias: str, **options: Any) -> None:
        super().__init__(num_experts, **options)
        self._unseen = bias == "data"
        zeros_E = torch.zeros(num_experts)
        if bias == "buffer":
            self.register_buffer("bias", zeros_E)
        else:
            self.bias = nn.Parameter(zeros_E, requires_grad=False)
        self.register_buffer("load", torch.zeros(num_experts), persistent=False)

    @override
    def _choose(self, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        expert_T = (probs_TE + self.bias).argmax(-1)
        if self.training:
            self.load = self.load + functional.one_hot(expert_T, len(self.experts)).sum(0)
        return probs_TE.gather(1, expert_T[:, None])[:, 0], expert_T

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias towards experts that had too few tokens on all ranks."""
        load_E = self.load.clone()
        if dist.is_initialized():
            dist.all_reduce(load_E)
        target = self.bias.data if self._unseen else self.bias  # no version counter sees what `.data` changes
        target.add_(self.SPEED * torch.sign(load_E.mean() - load_E))
        self.load.zero_()


class Counting(nn.Module):
    """Counts its calls, in training and in validation, and epochs, in buffers that its output depends on."""

    seen: Tensor
    calls: Tensor
    validated: Tensor
    epochs: Tensor

    def __init__(self, inner: Residual) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("validated", torch.zeros((), dtype=torch.float64))
        self.register_buffer("epochs", torch.zeros(1, dtype=torch.int32))

    @torch.no_grad()
    def begin_epoch(self) -> None:
        """Count it, and shrink some weights."""
        self.epochs += 1
        self.inner.head.weight.mul_(0.9)

    @override
    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.seen += tokens_BS.numel()
            self.calls = self.calls + 1  # another tensor each time
        else:
            self.validated += 1
        logits_BSV, aux = self.inner(tokens_BS)
        turn = torch.sin(self.calls + self.epochs + self.seen / 7 + self.validated / 3).float()
        return logits_BSV * (1 + 0.05 * turn), aux


def _expert(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(MODEL_DIM, 2 * MODEL_DIM), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * MODEL_DIM, MODEL_DIM)
    )


class StackedMoE(nn.Module):
    """The package's own layer: stacked experts, sharded over expert-parallel ranks, some tokens dropped."""

    def __init__(
        self,
        num_experts: int = NUM_EXPERTS,
        *,
        expansion: int = 2,
        gate_fp32: bool,
        noisy: bool,
        never_routed: bool,
        capacity_factor: float = 1.25,
        one_capacity: bool = False,
    ) -> None:
        super().__init__()
        from lightning_moe_ckpt.moe import MoELayer

        layer = MoELayer(
            MODEL_DIM,
            expansion * MODEL_DIM,
            num_experts,
            top_k=2,
            capacity_factor=capacity_factor,
            gate_fp32=gate_fp32,
            noisy_gate=noisy,
        )
        if never_routed:
            layer.gate.register_forward_hook(_block_last_expert)
            layer.gate.register_forward_hook(_block_own_expert)
        self.layer = OneCapacity(layer) if one_capacity else layer

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        y_TD = self.layer(x_TD)
        assert self.layer.l_aux is not None
        return y_TD, self.layer.l_aux


class OneCapacity(nn.Module):
    """A layer like the package's own, of another class: its capacity is one number for all experts."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.inner = layer

    @override
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    @property
    def capacity_factor(self) -> float:
        """Read at every forward."""
        factor: float = self.inner.capacity_factor
        return factor

    @capacity_factor.setter
    def capacity_factor(self, factor: float) -> None:
        assert isinstance(factor, float), "of all experts"
        self.inner.capacity_factor = factor

    @override
    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.inner(x_TD)
        return y_TD


def _block_last_expert(gate: nn.Module, args: tuple[Any, ...], logits_TE: Tensor) -> Tensor:
    blocked_E = functional.one_hot(torch.tensor(NEVER_ROUTED), logits_TE.shape[-1]).bool()
    return logits_TE.masked_fill(blocked_E, torch.finfo(logits_TE.dtype).min)


def _block_own_expert(gate: nn.Module, args: tuple[Any, ...], logits_TE: Tensor) -> Tensor:
    """Each of several ranks avoids one expert that others route to: the one that has its number."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return logits_TE
    blocked_E = functional.one_hot(torch.tensor(dist.get_rank()), logits_TE.shape[-1]).bool()
    return logits_TE.masked_fill(blocked_E, torch.finfo(logits_TE.dtype).min)


class Residual(nn.Module):
    """Embedding, a dense residual block, one MoE layer, a head: everything that tends to be stored wrongly."""

    def __init__(self, moe: nn.Module, *, dropout: float = 0.1, batch_norm: bool = False, recompute: str = "") -> None:
        super().__init__()
        self._recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, MODEL_DIM)
        self.norm = nn.LayerNorm(MODEL_DIM)
        self.dense = nn.Linear(MODEL_DIM, MODEL_DIM)
        self.dropout = nn.Dropout(dropout)
        self.running = nn.BatchNorm1d(MODEL_DIM) if batch_norm else nn.Identity()
        self.moe = moe
        self.head = nn.Linear(MODEL_DIM, VOCABULARY)

    @override
    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        x_TD = self.embedding(tokens_BS).flatten(0, 1)
        x_TD = x_TD + self.dropout(functional.gelu(self.dense(self.norm(x_TD))))
        y_TD, aux = _recomputed(self.moe, self.running(x_TD), self._recompute)
        return self.head(x_TD + y_TD).unflatten(0, tokens_BS.shape), aux


def _recomputed(module: nn.Module, x: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Run a module, throwing its activations away if `how` says `reentrant` or `not_reentrant`."""
    if not how or not torch.is_grad_enabled():
        y, aux = module(x)
    else:
        y, aux = checkpoint(module, x, use_reentrant=how == "reentrant")
    return y, aux


class _DenseMLP(nn.Module):
    """In the place of experts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = _expert(dropout)

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x_TD), x_TD.new_zeros(())


class _Block(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(MODEL_DIM), nn.LayerNorm(MODEL_DIM)
        self.qkv = nn.Linear(MODEL_DIM, 3 * MODEL_DIM)
        self.out = nn.Linear(MODEL_DIM, MODEL_DIM)
        self.moe = moe

    @override
    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm1(x_BSD)).chunk(3, -1))
        x_BSD = x_BSD + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        y_TD, aux = self.moe(self.norm2(x_BSD).flatten(0, 1))
        return x_BSD + y_TD.unflatten(0, x_BSD.shape[:2]), aux


class TiedGPT(nn.Module):
    """Transformer blocks whose token embedding is also the head."""

    def __init__(self, make_moe: Callable[[], nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, MODEL_DIM)
        self.places = nn.Embedding(SEQUENCE, MODEL_DIM)
        self.blocks = nn.ModuleList(_Block(make_moe()) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(MODEL_DIM)
        self.head = nn.Linear(MODEL_DIM, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    @override
    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        x_BSD = self.tokens(tokens_BS) + self.places.weight
        total = x_BSD.new_zeros(())
        for block in self.blocks:
            x_BSD, aux = block(x_BSD)
            total = total + aux
        return self.head(self.norm(x_BSD)), total


def tiny_mixtral(**options: Any) -> Any:
    """Hugging Face's Mixtral, a few thousand random parameters.

    Args:
        options: more of its config.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=MODEL_DIM,
        intermediate_size=2 * MODEL_DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=SEQUENCE,
        **options,
    )
    return MixtralForCausalLM(config)


class TinyMixtral(nn.Module):
    """Hugging Face's Mixtral from a random config; optionally with an expert that gets no token."""

    def __init__(self, *, never_routed: bool) -> None:
        super().__init__()
        self.model = tiny_mixtral(use_cache=False, output_router_logits=True)
        if never_routed:
            for layer in self.model.model.layers:
                layer.mlp.gate.register_forward_hook(_avoid_last_expert)

    @override
    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids=tokens_BS)
        return out.logits, out.aux_loss


def _avoid_last_expert(router: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Route again, with the logit of one expert out of reach: a bias that the router's class does not offer."""
    logits_TE = output[0]
    probs_TE = _block_last_expert(router, args, logits_TE).float().softmax(-1)
    top_TK, index_TK = probs_TE.topk(router.top_k, dim=-1)
    return logits_TE, top_TK / top_TK.sum(-1, keepdim=True), index_TK


class Shift(nn.Module):
    """Steers tokens to a few experts, others after every few forwards: a skewed router whose taste changes."""

    forwards: Tensor

    def __init__(self, every: int) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self._every = every

    @override
    def forward(self, gate: nn.Module, args: tuple[Any, ...], logits_TE: Tensor) -> Tensor:
        if gate.training:
            self.forwards += 1
        num_experts = logits_TE.shape[-1]
        favourite = (self.forwards - 1).clamp(min=0) // self._every * 5 % num_experts
        distance_E = (torch.arange(num_experts) - favourite) % num_experts
        return logits_TE - 0.5 * distance_E.to(logits_TE.dtype)


def _shift(module: nn.Module, every: int) -> None:
    for name, gate in list(module.named_modules()):
        if name.endswith("gate"):
            moe = module.get_submodule(name.rpartition(".")[0])
            moe.shift = Shift(every)
            gate.register_forward_hook(moe.shift)


def build(name: str, *, shift_every: int = 0, **options: Any) -> nn.Module:
    """A model by name: `lists`, `batch_norm`, `tied`, `mixtral`, `stacked`, `layers`, `counting`, `biased` or `dense`.

    See `Shift` for `shift_every`, `_build` for other options.
    """
    module = _build(name, **options)
    if shift_every:
        _shift(module, shift_every)
    return module


def _build(
    name: str,
    *,
    num_experts: int = NUM_EXPERTS,
    expansion: int = 2,
    dropout: float = 0.1,
    gate_fp32: bool = False,
    noisy: bool = False,
    never_routed: bool = False,
    recompute: str = "",
    bias: str = "buffer",
    capacity_factor: float = 1.25,
    one_capacity: bool = False,
    shared: bool = False,
) -> nn.Module:
    options: dict[str, Any] = {"gate_fp32": gate_fp32, "noisy": noisy, "never_routed": never_routed}
    if name == "mixtral":
        return TinyMixtral(never_routed=never_routed)
    if name == "dense":
        return TiedGPT(lambda: _DenseMLP(dropout), num_blocks=4)
    if name == "tied":
        return TiedGPT(lambda: ListMoE(num_experts, dropout=dropout, shared=shared, **options))
    if name == "layers":
        factors = iter((2.0, 1.0, 0.5))
        return TiedGPT(lambda: StackedMoE(num_experts, capacity_factor=next(factors), **options), num_blocks=3)
    if name == "stacked":
        moe: nn.Module = StackedMoE(
            num_experts, expansion=expansion, capacity_factor=capacity_factor, one_capacity=one_capacity, **options
        )
    elif name == "biased":
        moe = BiasedMoE(num_experts, bias=bias, dropout=dropout, **options)
    else:
        moe = ListMoE(num_experts, dropout=dropout, shared=shared, **options)
    model = Residual(moe, dropout=dropout, batch_norm=name == "batch_norm", recompute=recompute)
    return Counting(model) if name == "counting" else model
