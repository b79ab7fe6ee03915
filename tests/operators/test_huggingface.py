"""Hugging Face models as they are: every parameter placed once, tokens counted as the router chose them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_moe_ckpt.operators import LoadCounter, OperatorSet, discover

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def mixtral(**more: Any) -> nn.Module:
    config = transformers.MixtralConfig(**COMMON, num_local_experts=4, **more)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe() -> nn.Module:
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    )


def olmoe() -> nn.Module:
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**COMMON, num_experts=4))


def deepseek_v3() -> nn.Module:
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **COMMON,
            n_routed_experts=4,
            moe_intermediate_size=8,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            n_shared_experts=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
        )
    )


def gpt_oss() -> nn.Module:
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**COMMON, num_local_experts=4, head_dim=4))


def switch() -> nn.Module:
    ids: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            vocab_size=64,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            expert_capacity=3,
            **ids,
        )
    )


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=8)
    return transformers.Qwen3MoeForCausalLM(config)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "mixtral": (mixtral, "gate", 2),
    "qwen2_moe": (qwen2_moe, "gate", 2),
    "qwen3_moe": (qwen3_moe, "gate", 2),
    "olmoe": (olmoe, "gate", 2),
    "deepseek_v3": (deepseek_v3, "gate", 1),
    "gpt_oss": (gpt_oss, "router", 2),
    "switch": (switch, "router", 2),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[nn.Module, str, int]:
    build, router, num_layers = FAMILIES[request.param]
    torch.manual_seed(0)
    return build(), router, num_layers


def chosen(out: tuple[Tensor, ...], num_experts: int) -> Tensor:
    """Tokens per expert from what a router returns: indices, or Switch's mask of kept tokens."""
    index = next(t for t in out if t.dtype == torch.int64)
    if index.shape[-1] == num_experts:
        return index.sum((0, 1))
    return torch.bincount(index.flatten(), minlength=num_experts)


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
    assert {fqn for fqn, _ in model.named_parameters() if "shared_expert" in fqn} <= dense
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


SIGMOID = {"deepseek_v3"}
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
            logits_TE = next(t for t in out if t.is_floating_point() and t.shape[-1] == 4).detach().reshape(-1, 4)
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


def test_a_layer_whose_tokens_cannot_be_counted_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Llama 4 gives its experts every token and no indices: placed, not counted, and reported once."""
    model = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **{**COMMON, "num_experts_per_tok": 1}, num_local_experts=4, head_dim=4, intermediate_size_mlp=24
        )
    )
    operators = discover(model)
    assert_placed_once(operators, model)
    counter = LoadCounter(operators, model)
    counter.install()
    for _ in range(2):
        model(input_ids=torch.randint(1, 64, (2, 8)))
    assert not counter.read_and_reset().any()
    assert sum("cannot be counted" in r.message for r in caplog.records) == 2
