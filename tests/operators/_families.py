"""Tiny random models of Hugging Face, one of each family of Mixture-of-Experts."""

# mypy: no-warn-return-any
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

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

DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}


def mixtral(num_experts: int = 4, **more: Any) -> nn.Module:
    config = transformers.MixtralConfig(**COMMON, num_local_experts=num_experts, **more)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe(num_experts: int = 4, **more: Any) -> nn.Module:
    sizes: dict[str, Any] = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**COMMON, num_experts=num_experts, **sizes, **more)
    )


def olmoe(num_experts: int = 4, **more: Any) -> nn.Module:
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**COMMON, num_experts=num_experts, **more))


def deepseek_v3(num_experts: int = 4, **more: Any) -> nn.Module:
    options: dict[str, Any] = {**COMMON, **DEEPSEEK, "n_routed_experts": num_experts, "n_group": 2, "topk_group": 1}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options, **more))


def gpt_oss(num_experts: int = 4, **more: Any) -> nn.Module:
    options: dict[str, Any] = {**COMMON, "num_local_experts": num_experts, "head_dim": 4}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**options, **more))


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


def deepseek_v2(num_experts: int = 4, **more: Any) -> nn.Module:
    options: dict[str, Any] = {**COMMON, **DEEPSEEK, "n_routed_experts": num_experts}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**options, **more))


def granite_moe() -> nn.Module:
    return transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**COMMON, num_local_experts=4))


def granite_moe_shared() -> nn.Module:
    config = transformers.GraniteMoeSharedConfig(**COMMON, num_local_experts=4, shared_intermediate_size=8)
    return transformers.GraniteMoeSharedForCausalLM(config)


def llama4() -> nn.Module:
    options: dict[str, Any] = {**COMMON, "num_experts_per_tok": 1}
    config = transformers.Llama4TextConfig(**options, num_local_experts=4, head_dim=4, intermediate_size_mlp=24)
    return transformers.Llama4ForCausalLM(config)


def dbrx() -> nn.Module:
    ffn: dict[str, Any] = {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
    options: dict[str, Any] = {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 64}
    return transformers.DbrxForCausalLM(
        transformers.DbrxConfig(
            **options, attn_config={"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0}, ffn_config=ffn, pad_token_id=0
        )
    )


def qwen3_moe(num_experts: int = 4, **more: Any) -> nn.Module:
    config = transformers.Qwen3MoeConfig(**COMMON, num_experts=num_experts, moe_intermediate_size=8, **more)
    return transformers.Qwen3MoeForCausalLM(config)


def nllb_moe() -> nn.Module:
    """The family that is refused."""
    return transformers.NllbMoeForConditionalGeneration(
        transformers.NllbMoeConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_experts=4,
            expert_capacity=64,
            encoder_sparse_step=1,
            decoder_sparse_step=9,
            encoder_layerdrop=0.0,
            max_position_embeddings=64,
        )
    )


FAMILIES: dict[str, tuple[Callable[..., nn.Module], str, int]] = {
    "mixtral": (mixtral, "gate", 2),
    "qwen2_moe": (qwen2_moe, "gate", 2),
    "qwen3_moe": (qwen3_moe, "gate", 2),
    "olmoe": (olmoe, "gate", 2),
    "deepseek_v3": (deepseek_v3, "gate", 1),
    "gpt_oss": (gpt_oss, "router", 2),
    "switch": (switch, "router", 2),
    "deepseek_v2": (deepseek_v2, "gate", 1),
    "granite_moe": (granite_moe, "router", 2),
    "granite_moe_shared": (granite_moe_shared, "router", 2),
    "llama4": (llama4, "router", 2),
    "dbrx": (dbrx, "router", 2),
}
"""How to build it, name of the router in the block, number of MoE layers; 4 experts each."""

SPREAD = {
    "Mixtral": "mixtral",
    "Qwen2-MoE": "qwen2_moe",
    "Qwen3-MoE": "qwen3_moe",
    "OLMoE": "olmoe",
    "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3": "deepseek_v3",
    "GPT-OSS": "gpt_oss",
}
"""Families whose experts are spread over ranks in tests, by their names in the documentation: these take `num_experts`, and more of
their config."""


def balanced(name: str, num_experts: int, **more: Any) -> Any:
    """A family of `SPREAD` that returns a balancing loss if it has one: DeepSeek does not."""
    options = {} if name.startswith("deepseek") else {"output_router_logits": True}
    return FAMILIES[name][0](num_experts, use_cache=False, **options, **more)
