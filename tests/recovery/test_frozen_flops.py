"""Each kind of layer saves what its share of weights allows while operators are frozen: the table of `docs/policies.md`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet, discover
from lightning_moe_ckpt.recovery import Frozen

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
POINTS = 3
"""Percent of a step by which savings may differ from those that weights allow."""
SIZE = 48


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _MultiheadAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(SIZE, 4, batch_first=True, **options)

    @override
    def forward(self, x: Tensor) -> Tensor:
        other = x[..., : self.inner.kdim]
        out: Tensor = self.inner(x, other, other, need_weights=False)[0]
        return out


def _tutel() -> nn.Module:
    place = Path(__file__).parents[1] / "operators" / "_tutel_standin.py"
    spec = importlib.util.spec_from_file_location("_tutel_standin", place)
    assert spec is not None
    assert spec.loader is not None
    standin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)
    layer: nn.Module = standin.MOELayer(SIZE, 96, 8, capacity_factor=0)
    return layer


def _transformer(name: str, experts: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        size: dict[str, Any] = {"vocab_size": 64, "hidden_size": SIZE, "intermediate_size": 96, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
        size |= {"num_local_experts" if name == "Mixtral" else "num_experts": 8}
        if name != "Mixtral":
            size |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        config = getattr(transformers, f"{name}Config")(**size, experts_implementation=experts)
        model: nn.Module = getattr(transformers, f"{name}Model")(config)
        return model

    return make


def _lora() -> nn.Module:
    layers = nn.Sequential(nn.Linear(SIZE, 96), nn.GELU(), nn.Linear(96, SIZE))
    return peft.get_peft_model(layers, peft.LoraConfig(r=8, target_modules=["0", "2"]))


X = torch.randn(4, 16, SIZE, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "`nn.Linear`, two and a GELU": (lambda: nn.Sequential(nn.Linear(SIZE, 96), nn.GELU(), nn.Linear(96, SIZE)), X),
    "attention by hand: q, k, v, out": (_Attention, X),
    "`nn.MultiheadAttention`": (_MultiheadAttention, X),
    "`nn.MultiheadAttention(kdim=, vdim=)`": (lambda: _MultiheadAttention(kdim=32, vdim=32), X),
    "`nn.TransformerEncoderLayer`": (lambda: nn.TransformerEncoderLayer(SIZE, 4, 192, batch_first=True), X),
    "`nn.Conv2d`, two": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1, padding_mode="circular")),
        X[..., :48].view(4, 4, 4, 48)[:, :3],
    ),
    "`nn.ConvTranspose1d`, two": (
        lambda: nn.Sequential(nn.ConvTranspose1d(16, 8, 3), nn.ConvTranspose1d(8, 16, 3)),
        X,
    ),
    "`nn.Embedding` and `nn.Linear`": (lambda: nn.Sequential(nn.Embedding(64, SIZE), nn.Linear(SIZE, 64)), TOKENS),
    "`MoELayer`": (lambda: MoELayer(SIZE, 96, 8), X),
    "Mixtral, `eager`": (_transformer("Mixtral", "eager"), TOKENS),
    "Mixtral, `batched_mm`": (_transformer("Mixtral", "batched_mm"), TOKENS),
    "Mixtral, `grouped_mm`": (_transformer("Mixtral", "grouped_mm"), TOKENS),
    "Qwen2-MoE, `eager`": (_transformer("Qwen2Moe", "eager"), TOKENS),
    "Qwen2-MoE, `batched_mm`": (_transformer("Qwen2Moe", "batched_mm"), TOKENS),
    "Qwen2-MoE, `grouped_mm`": (_transformer("Qwen2Moe", "grouped_mm"), TOKENS),
    "layout of Tutel": (_tutel, X.flatten(0, 1)),
    "LoRA of PEFT, rank 8": (_lora, X),
}
"""Layers of which each has operators to freeze, and an input."""


def _grouped(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * a[0] * a[1] * b[-1]


def _step(model: nn.Module, x: Tensor) -> tuple[int, dict[str, Tensor]]:
    """Return the operations of a step whose input has a gradient, and gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped}) as counter:
        out = model(x)
        out = out if isinstance(out, Tensor) else out.last_hidden_state
        out.square().mean().backward()
    return counter.get_total_flops(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _allowed(model: nn.Module, operators: OperatorSet, x: Tensor, *, by_tokens: bool) -> dict[str, float]:
    """Return the operations that torch itself leaves out where an operator's parameters do not train.

    Experts of a stack have shares of the stack's: by their tokens, or alike where all are filled up to one capacity.
    """
    counter = LoadCounter(operators, model)
    counter.install()
    whole, _ = _step(model, x)
    tokens = counter.read_and_reset().tolist()
    counter.remove()
    experts = [operator.name for operator in operators if operator.kind == "expert"]
    shares = dict(zip(experts, tokens, strict=True)) if by_tokens else {}
    found = dict.fromkeys(operators.names, 0.0)
    first = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for fqn, param in model.named_parameters():
        # Behind an embedding that does not train, other layers have inputs without a gradient.
        if param.requires_grad and id(param) not in first:
            param.requires_grad_(False)
            saved = whole - _step(model, x)[0]
            param.requires_grad_(True)
            sharing = [each.name for each in operators if any(piece.fqn == fqn for piece in each.slices)]
            total = sum(shares.get(name, 1) for name in sharing)
            for name in sharing:
                found[name] += saved * shares.get(name, 1) / total
    return found


def _row(kind: str) -> tuple[str, list[tuple[float, float]]]:
    """Return the page's row of a kind, and its figures: percent saved and allowed, with all and with half of it frozen."""
    torch.manual_seed(1)
    make, x = KINDS[kind]
    model = make()
    operators = discover(model, ep_size=1)
    whole, want = _step(model, x)
    allowed = _allowed(model, operators, x, by_tokens="Tutel" not in kind)
    frozen = Frozen(model, operators, as_user=lambda: None)
    names, figures = list(operators.names), []
    for active in ([], names[1::2]):
        frozen.freeze(active)
        flops, got = _step(model, x)
        frozen.thaw()
        _check_bits(operators, active, want, got)
        possible = sum(flops for name, flops in allowed.items() if name not in active)
        figures.append((100 * (1 - flops / whole), 100 * possible / whole))
    cells = " | ".join(f"{saved:.0f} % | {possible:.0f} %" for saved, possible in figures)
    return f"| {kind} | {cells} |", figures


def _check_bits(
    operators: OperatorSet, active: Collection[str], want: dict[str, Tensor], got: dict[str, Tensor]
) -> None:
    for operator in (each for each in operators if each.name in active):
        for piece in (each for each in operator.slices if each.fqn in want):  # others do not train
            a, b = (each[piece.fqn].flatten()[piece.start : piece.stop] for each in (want, got))
            assert torch.equal(a, b), f"{operator.name} has another gradient while others are frozen"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_layer_saves_what_its_weights_allow(kind: str) -> None:
    """Counted operations are within three percent of a step of those without gradients of the frozen weights; the page has them."""
    row, figures = _row(kind)
    for saved, possible in figures:
        assert abs(saved - possible) <= POINTS, f"{kind}: {saved:.1f} % are saved, {possible:.1f} % is their share"
    assert figures[0][0] > 0
    assert row in PAGE.read_text().splitlines(), f"docs/policies.md, frozen parts: the row is now\n{row}"
