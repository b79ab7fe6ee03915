"""Describe PEFT adapters for exports: their stored parameters, and the names under which PEFT looks for these.

PEFT itself gives the names; it is imported only if the module is made of PEFT models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

ADAPTERS = "peft"
"""Key for adapters in `read_extra`'s result."""


def describe_adapters(module: nn.Module, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return a description of the active adapter in each PEFT model in a module.

    Args:
        module: the module.
        names: stored names of its tensors, by identity.

    Returns:
        For each PEFT model: the prefix of its names; the adapter's name and `adapter_config.json`; stored names by name
        in `adapter_model.safetensors`; the products that a merge adds to base weights; and the layers that are not such
        products.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not hasattr(peft, "PeftModel"):
        return []
    models = [(prefix, each) for prefix, each in module.named_modules() if isinstance(each, peft.PeftModel)]
    return [_described(peft, prefix, model, names) for prefix, model in models]


def _described(peft: Any, prefix: str, model: Any, names: Mapping[int, str]) -> dict[str, Any]:
    adapter = str(model.active_adapters[0])
    state = model.state_dict(keep_vars=True)
    keys = peft.get_peft_model_state_dict(model, state, adapter_name=adapter, save_embedding_layers=False)
    config = {key: _plain(value) for key, value in model.peft_config[adapter].to_dict().items()}
    base = model.get_base_model()
    config["inference_mode"] = True
    config["base_model_name_or_path"] = config["base_model_name_or_path"] or getattr(base, "name_or_path", None) or None
    if config.get("task_type") is None:
        config["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    layers = {fqn: module for fqn, module in model.named_modules() if adapter in getattr(module, "lora_A", ())}
    sums = {fqn: _sum(layer, adapter, names) for fqn, layer in layers.items()}
    tuned = (module for module in model.modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer))
    simple = model.peft_config[adapter].peft_type == "LORA" and len([*tuned]) == len(layers)
    return {
        "prefix": prefix,
        "adapter": adapter,
        "config": json.dumps(config, indent=2, sort_keys=True),
        "keys": {key: names[id(value)] for key, value in keys.items() if id(value) in names},
        "sums": [each for each in sums.values() if each is not None],
        "others": [
            *(fqn for fqn, each in sums.items() if each is None),
            *([] if simple else ["layers other than LoRA's"]),
        ],
    }


def _sum(layer: Any, adapter: str, names: Mapping[int, str]) -> dict[str, Any] | None:
    """Return the product that a merge adds to a layer's weight; `None` if it is not that of two matrices."""
    kind, variants = type(layer).__name__, getattr(layer, "lora_variant", {})
    if kind not in {"Linear", "ParamWrapper"} or adapter in variants or layer.lora_bias.get(adapter):
        return None
    weight = layer.get_param() if kind == "ParamWrapper" else layer.get_base_layer().weight
    factors = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if any(id(each) not in names for each in (weight, *factors)):
        return None
    return {
        "weight": names[id(weight)],
        "a": names[id(factors[0])],
        "b": names[id(factors[1])],
        "scaling": float(layer.scaling[adapter]),
        "transposed": bool(layer.fan_in_fan_out),
        "experts": int(getattr(layer, "num_experts", 1)),
        "swapped": bool(getattr(layer, "_did_swap_in_out_features", False)),
    }


def _plain(value: Any) -> Any:
    """Return a configuration's value as PEFT writes it to JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value
