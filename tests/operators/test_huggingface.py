"""Hugging Face models as they are: every parameter placed once, tokens counted as the router chose them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet, discover, register_adapter
from lightning_moe_ckpt.operators.adapters import unregister_adapter
from operators._families import (
    COMMON,
    FAMILIES,
    dbrx,
    deepseek_v3,
    granite_moe_shared,
    llama4,
    mixtral,
    nllb_moe,
    qwen2_moe,
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[nn.Module, str, int]:
    build, router, num_layers = FAMILIES[request.param]
    torch.manual_seed(0)
    return build(), router, num_layers


def chosen(out: tuple[Tensor, ...] | Tensor, num_experts: int) -> Tensor:
    """Tokens per expert from what a router returns: indices, Switch's mask of kept tokens, or logits alone."""
    values = (out,) if isinstance(out, Tensor) else out
    index = next((t for t in values if t.dtype == torch.int64), None)
    if index is None:  # Llama 4 takes one expert per token, DBRX here two
        index = values[-1].detach().topk(len(values) % 2 + 1, dim=-1).indices
    if index.shape[-1] == num_experts:
        return index.sum((0, 1))
    return torch.bincount(index.flatten(), minlength=num_experts)


def logits(out: tuple[Tensor, ...] | Tensor, num_experts: int) -> Tensor:
    """What a router emits for every expert before any choice, `[T, E]`; Llama 4 emits it after its scores."""
    values = (out,) if isinstance(out, Tensor) else out
    found = [t for t in values if t.is_floating_point() and t.shape[-1] == num_experts]
    return found[-1].detach().reshape(-1, num_experts)


def assert_placed_once(operators: OperatorSet, module: nn.Module) -> None:
    covered = {fqn: torch.zeros(p.numel(), dtype=torch.int64) for fqn, p in module.named_parameters()}
    for op in operators:
        for piece in op.slices:
            covered[piece.fqn][piece.start : piece.stop] += 1
    assert all(torch.equal(c, torch.ones_like(c)) for c in covered.values())


def test_every_parameter_is_placed_once(family: tuple[nn.Module, str, int]) -> None:
    """Experts and routers by layer, the rest by block; shared experts with the rest."""
    model, router, num_layers = family
    operators = discover(model)
    assert_placed_once(operators, model)
    assert len(operators.layers) == num_layers
    for layer in operators.layers:
        assert layer.local_expert_ids == (0, 1, 2, 3)
        own = {s.fqn for s in operators[f"{layer.fqn}/router"].slices}
        assert own == {n for n, _ in model.named_parameters() if n.startswith(f"{layer.fqn}.{router}.")}
        for j in range(4):
            names = {s.fqn for s in operators[f"{layer.fqn}/expert.{j}"].slices}
            assert names
            assert all(n.startswith(f"{layer.fqn}.experts.") for n in names)
    dense = {s.fqn for op in operators if op.kind == "dense" for s in op.slices}
    assert not any(".experts." in fqn for fqn in dense)
    assert {fqn for fqn, _ in model.named_parameters() if re.search("shared_(expert|mlp)", fqn)} <= dense
    assert max(op.numel for op in operators) < 0.6 * sum(p.numel() for p in model.parameters())


def test_counts_are_what_the_router_chose(family: tuple[nn.Module, str, int]) -> None:
    """Also with gradient accumulation: counts add up until they are read."""
    model, router, _ = family
    operators = discover(model)
    want = torch.zeros(operators.num_experts, dtype=torch.int64)
    for i, layer in enumerate(operators.layers):

        def add(module: nn.Module, args: object, out: tuple[Tensor, ...], i: int = i) -> None:
            want[4 * i : 4 * i + 4] += chosen(out, 4)

        model.get_submodule(f"{layer.fqn}.{router}").register_forward_hook(add)
    counter = LoadCounter(operators, model)
    counter.install()
    for _ in range(2):
        tokens = torch.randint(1, 64, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert torch.equal(counter.read_and_reset(), want)
    assert want.max() > want.min()
    assert not counter.read_and_reset().any()


SIGMOID = {"deepseek_v3", "llama4"}
"""Families whose routers score experts by sigmoid; the others take a softmax over all experts."""


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_soft_and_hard_counts_are_those_of_every_family(name: str, use_reentrant: bool | None) -> None:
    """Router probabilities to the last bit, choices exactly, with gradient checkpointing, accumulation and evaluation."""
    build, router, _ = FAMILIES[name]
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if use_reentrant is not None:
        checkpointed: Any = model
        checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        checkpointed.enable_input_require_grads()
    operators = discover(model)
    hard = torch.zeros(operators.num_experts, dtype=torch.int64)
    soft = torch.zeros(operators.num_experts, dtype=torch.float64)
    by_hand = True

    def add(at: slice, module: nn.Module, args: object, out: tuple[Tensor, ...]) -> None:
        if by_hand:
            logits_TE = logits(out, 4)
            hard[at] += chosen(out, 4)
            soft[at] += (logits_TE.sigmoid() if name in SIGMOID else logits_TE.softmax(-1)).sum(0, dtype=torch.float64)

    for i, layer in enumerate(operators.layers):
        hook = partial(add, slice(4 * i, 4 * i + 4))
        model.get_submodule(f"{layer.fqn}.{router}").register_forward_hook(hook)
    counters = LoadCounter(operators, model), LoadCounter(operators, model, "probabilities")
    for counter in counters:
        assert counter.uncounted == ()
        counter.install()
    for _ in range(2):
        tokens = torch.randint(1, 64, (2, 8))
        by_hand = True
        loss = model(input_ids=tokens, labels=tokens).loss
        by_hand = False
        loss.backward()
        model.eval()(input_ids=tokens, labels=tokens)
        model.train()
    assert torch.equal(counters[0].read_and_reset(), hard)
    assert torch.equal(counters[1].read_and_reset(), soft)
    assert hard.sum() > 0
    assert len(set(soft.tolist())) == len(soft)


def test_tied_embeddings_are_one_operator() -> None:
    """The head of a tied model is the embedding."""
    model = mixtral(tie_word_embeddings=True)
    operators = discover(model)
    assert "lm_head" not in operators
    assert [s.fqn for s in operators["model.embed_tokens"].slices] == ["model.embed_tokens.weight"]
    assert_placed_once(operators, model)


def test_a_dense_decoder_has_one_operator_per_layer() -> None:
    """Llama has no experts and works all the same."""
    dense = {k: v for k, v in COMMON.items() if k != "num_experts_per_tok"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**dense))
    assert discover(model).names == ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


def test_what_is_shared_by_all_tokens_is_no_expert() -> None:
    """Shared experts and their gates train with their block."""
    for build, parts in ((qwen2_moe, ["shared_expert.", "shared_expert_gate."]), (granite_moe_shared, ["shared_mlp."])):
        model = build()
        shared = {n for n, _ in model.named_parameters() if any(part in n for part in parts)}
        owners = {op.name for op in discover(model) for piece in op.slices if piece.fqn in shared}
        assert len(shared) >= 4
        assert owners == {"model.layers.0", "model.layers.1"}


def test_a_correction_bias_is_the_routers() -> None:
    """It is a buffer that trainers move by load; it goes where the router goes."""
    operators = discover(deepseek_v3())
    assert operators["model.layers.1.mlp/router"].buffers == ("model.layers.1.mlp.gate.e_score_correction_bias",)
    assert all(not op.buffers for op in operators if op.kind != "router")


def test_rows_of_merged_experts_are_cut_where_the_model_cuts_them() -> None:
    """DBRX views its matrices as `[E, F, D]`; so do the operators."""
    model = dbrx()
    operators = discover(model)
    params = dict(model.named_parameters())
    fqn = operators.layers[0].fqn
    for expert in range(4):
        pieces = {s.fqn.rpartition(".")[2]: s for s in operators[f"{fqn}/expert.{expert}"].slices}
        assert set(pieces) == {"w1", "v1", "w2"}
        for piece in pieces.values():
            param = params[piece.fqn]
            want = param.view(4, 24, 16)[expert].flatten()
            assert torch.equal(param.flatten()[piece.start : piece.stop], want)
            assert piece.global_shape == param.shape


def test_a_broken_family_is_refused_by_name() -> None:
    """NLLB-MoE of transformers 5 runs two of its experts only; the reason stands in the error, and it is true."""
    model = nllb_moe()
    with pytest.raises(
        UnknownLayout, match=r"`model.encoder.layers.0.ffn` is NllbMoeSparseMLP .* only experts 0 and 1"
    ):
        discover(model)
    experts: Any = model.get_submodule("model.encoder.layers.0.ffn.experts")
    ran: set[str] = set()
    for name in ("expert_0", "expert_1", "expert_2", "expert_3"):
        experts[name].register_forward_hook(lambda *_, name=name: ran.add(name))
    tokens = torch.randint(3, 64, (8, 32))
    model.eval()(input_ids=tokens, labels=tokens)
    assert ran == {"expert_0", "expert_1"}


def test_what_a_user_registers_comes_before_a_rule() -> None:
    """Whoever has mended the model can train it."""
    block = type(next(m for m in llama4().modules() if type(m).__name__ == "Llama4TextMoe"))
    register_adapter(block, lambda *_: None)
    try:
        assert discover(llama4()).layers == ()
    finally:
        unregister_adapter(block)
    assert len(discover(llama4()).layers) == 2


class _Scattered(nn.Module):
    """Stacked experts that are given tokens and nothing that says which."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("td,edf,efg->tg", x, self.w1, self.w2)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), _Scattered()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x) * self.gate(x).sum()
        return out


def test_a_layer_whose_tokens_cannot_be_counted_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Placed, not counted, and reported once."""
    model = _Block()
    operators = discover(model)
    assert_placed_once(operators, model)
    counter = LoadCounter(operators, model)
    counter.install()
    for _ in range(2):
        model(torch.randn(8, 4))
    assert not counter.read_and_reset().any()
    assert sum("cannot be counted" in r.message for r in caplog.records) == 1
