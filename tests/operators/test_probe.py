"""What the probe says is exact is exact: forward and backward with cast weights give the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import ComputeDtypeProbe

LOW = (torch.bfloat16, torch.float16)


class Gate(nn.Linear):
    """In fp32 even under autocast, or not."""

    def __init__(self, fp32: bool) -> None:
        super().__init__(8, 4, bias=False)
        self.fp32 = fp32

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.fp32):
            return F.linear(x.float() if self.fp32 else x, self.weight)


class Toy(nn.Module):
    """Every way of using a parameter that the design names."""

    def __init__(self, gate_fp32: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.pos = nn.Parameter(torch.randn(6, 8))
        self.emb_into_linear = nn.Embedding(16, 8)
        self.ln = nn.LayerNorm(8)
        self.proj = nn.Linear(8, 8)
        self.gate = Gate(gate_fp32)
        self.stacked = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.batched = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.gathered = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.unused = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, checkpointed: bool = False) -> Tensor:
        x = self.emb(tokens) + self.pos + self.proj(self.emb_into_linear(tokens))
        x = x + self.mix(self.ln(x)) if not checkpointed else x + checkpoint(self.mix, self.ln(x), use_reentrant=False)
        out: Tensor = self.head(F.dropout(x * self.scale, 0.1, self.training))
        return out

    def mix(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        weight, idx = self.gate(flat).softmax(-1).max(-1)
        parts = [F.linear(flat[idx == j], self.stacked[j]) for j in range(4)]
        out = torch.zeros_like(flat, dtype=parts[0].dtype)
        for j in range(4):
            out = out.index_copy(0, (idx == j).nonzero()[:, 0], parts[j])
        out = out + torch.bmm(flat.expand(4, -1, -1), self.batched.transpose(1, 2)).sum(0)
        out = out + torch.bmm(self.gathered[idx], flat[..., None])[..., 0]
        mixed: Tensor = (out * weight[:, None]).view_as(x)
        return mixed


def loss_of(model: nn.Module, low: torch.dtype, **kwargs: Any) -> Tensor:
    tokens = torch.randint(0, 16, (5, 6), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(7)
    with torch.autocast("cpu", low, cache_enabled=False):
        return F.cross_entropy(model(tokens, **kwargs).float().flatten(0, 1), tokens.flatten())


def bits(model: nn.Module, low: torch.dtype, **kwargs: Any) -> list[Tensor]:
    """Loss and all gradients of one iteration."""
    model.zero_grad()
    loss = loss_of(model, low, **kwargs)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())]


def stored(model: nn.Module, names: set[str], low: torch.dtype) -> nn.Module:
    """The model as it is after a restore of COMPUTE with `names` in low precision."""
    restored = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in restored.named_parameters():
            if name in names:
                p.copy_(p.to(low, copy=True))
    return restored


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def low_names(probe: ComputeDtypeProbe, low: torch.dtype) -> set[str]:
    return {name for name, dtype in probe.verdict().items() if dtype == low}


def probed(model: nn.Module, low: torch.dtype, **kwargs: Any) -> ComputeDtypeProbe:
    probe = ComputeDtypeProbe(model, low)
    with probe:
        bits(model, low, **kwargs)
    return probe


@pytest.fixture(params=LOW, ids=str)
def low(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def toy(gate_fp32: bool = False) -> Toy:
    torch.manual_seed(0)
    return Toy(gate_fp32)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("gate_fp32", [False, True])
def test_every_decision_for_low_precision_is_exact(low: torch.dtype, gate_fp32: bool, checkpointed: bool) -> None:
    """All of them together, and what needs full precision is left alone."""
    model = toy(gate_fp32)
    names = low_names(probed(model, low, checkpointed=checkpointed), low)
    want = {"proj.weight", "proj.bias", "stacked", "batched", "head.weight", "head.bias"}
    assert names == want | (set() if gate_fp32 else {"gate.weight"})
    assert same(bits(stored(model, names, low), low), bits(model, low))


@pytest.mark.parametrize("name", ["gate.weight", "emb.weight", "pos", "scale"])
def test_what_keeps_full_precision_needs_it(low: torch.dtype, name: str) -> None:
    """Storing it low would change bits: the comparison above can fail."""
    model = toy(gate_fp32=True)
    assert not same(bits(stored(model, {name}, low), low), bits(model, low))


def test_watching_changes_no_bit_and_no_random_number(low: torch.dtype) -> None:
    """Loss, gradients and the generator's state are those of an unwatched iteration."""
    model = toy()
    want, want_rng = bits(model, low), torch.get_rng_state()
    with ComputeDtypeProbe(model, low):
        assert same(bits(model, low), want)
        assert torch.equal(torch.get_rng_state(), want_rng)


def test_the_optimizer_step_is_not_evidence(low: torch.dtype) -> None:
    """Paused, the probe sees nothing; not paused, every parameter would need full precision."""
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters())
    probe = ComputeDtypeProbe(model, low)
    with probe:
        bits(model, low)
        want = low_names(probe, low)
        probe.pause()
        optimizer.step()
        probe.resume()
        bits(model, low)
        assert low_names(probe, low) == want != set()
        optimizer.step()
        assert low_names(probe, low) == set()


def test_iterations_add_up(low: torch.dtype) -> None:
    """One bad use in any iteration is enough; a parameter never seen stays as it is."""
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model = nn.ModuleDict({"a": a, "b": b})
    probe = ComputeDtypeProbe(model, low)

    def use(x: Tensor, name: str) -> None:
        with torch.autocast("cpu", low):
            model[name](x)

    with probe:
        use(torch.randn(2, 4), "a")
    assert probe.verdict() == {"a.weight": low, "b.weight": torch.float32}
    with probe:
        use(torch.randn(2, 4), "b")
    assert probe.verdict() == {"a.weight": low, "b.weight": low}
    with probe:
        a.weight.square().sum()
    assert probe.verdict() == {"a.weight": torch.float32, "b.weight": low}
    assert probe.reasons() == {"a.weight": frozenset({"aten.pow.Tensor_Scalar"})}


def test_shape_only_operations_are_neutral(low: torch.dtype) -> None:
    """A reducer that fills in zero gradients reads no value; a clone does."""
    model = nn.Linear(4, 4, bias=False)
    with ComputeDtypeProbe(model, low) as probe:
        torch.zeros_like(model.weight)
        torch.empty_like(model.weight)
        model.weight.new_zeros(3)
        with torch.autocast("cpu", low):
            model(torch.randn(2, 4))
    assert probe.verdict() == {"weight": low}
    with probe:
        model.weight.clone()
    assert probe.verdict() == {"weight": torch.float32}


def test_a_cast_to_another_type_is_no_evidence_for_it() -> None:
    """fp16 values cannot stand for what is read in bf16."""
    model = nn.Linear(4, 4, bias=False)
    with ComputeDtypeProbe(model, torch.bfloat16) as probe:
        model.weight.to(torch.float16)
    assert probe.verdict() == {"weight": torch.float32}


def test_tied_and_shared_weights_are_judged_by_all_their_uses(low: torch.dtype) -> None:
    """The head casts, the embedding does not; another parameter over the same bytes sees both."""
    emb, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = nn.Parameter(emb.weight.data)
    with ComputeDtypeProbe(nn.ModuleList([emb, head]), low) as probe, torch.autocast("cpu", low):
        head(emb(torch.tensor([1, 2])) * 2)
    assert set(probe.verdict().values()) == {torch.float32}


def test_neighbours_in_one_storage_are_told_apart(low: torch.dtype) -> None:
    """A flat buffer under all parameters does not mix their evidence."""
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model = nn.ModuleDict({"a": a, "b": b})
    flat = torch.randn(32)
    a.weight.data, b.weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)
    with ComputeDtypeProbe(model, low) as probe:
        b.weight.square()
        with torch.autocast("cpu", low):
            a(torch.randn(2, 4))
    assert probe.verdict() == {"a.weight": low, "b.weight": torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_autocast_parameters_keep_their_precision(dtype: torch.dtype) -> None:
    """32-true and bf16-true: what is stored is what is there."""
    model = nn.Linear(4, 4).to(dtype)
    with ComputeDtypeProbe(model, None) as probe:
        model(torch.randn(2, 4, dtype=dtype))
    assert set(probe.verdict().values()) == {dtype}


def test_a_module_moved_while_paused_is_found_again(low: torch.dtype) -> None:
    """Storage may change between iterations."""
    model = nn.Linear(4, 4, bias=False)
    with ComputeDtypeProbe(model, low) as probe:
        with torch.autocast("cpu", low):
            model(torch.randn(2, 4))
        assert probe.verdict() == {"weight": low}
        probe.pause()
        model.weight.data = torch.randn(4, 4)
        probe.resume()
        model.weight.square()
    assert probe.verdict() == {"weight": torch.float32}


@pytest.mark.parametrize("gate_fp32", [False, True])
def test_our_own_layer(low: torch.dtype, gate_fp32: bool) -> None:
    """Stacked experts are exact in low precision, the gate if it runs under autocast."""
    torch.manual_seed(0)
    layer = MoELayer(8, 16, 4, top_k=2, gate_fp32=gate_fp32)
    model = nn.Sequential(nn.Embedding(16, 8), layer, nn.Linear(8, 16))
    names = low_names(probed(model, low), low)
    assert {"1.w1", "1.b1", "1.w2", "1.b2", "2.weight", "2.bias"} <= names
    assert ("1.gate.weight" in names) == (not gate_fp32)
    assert same(bits(stored(model, names, low), low), bits(model, low))


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_hugging_face_mixtral(low: torch.dtype, experts: str) -> None:
    """Which expert weights may be low depends on the kernel; the verdict is exact for each."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": experts}
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            num_local_experts=4,
            **options,
        )
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mixtral

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.model(input_ids=tokens).logits
            return logits

    model = Logits()
    names = low_names(probed(model, low), low)
    stacked = {n for n, p in model.named_parameters() if p.ndim == 3}
    assert names & stacked == (stacked if experts == "eager" else set())
    assert any("q_proj" in n for n in names)
    assert not any("norm" in n or "embed" in n for n in names)
    assert same(bits(stored(model, names, low), low), bits(model, low))
