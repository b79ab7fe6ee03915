"""Describe the trained module for exports by other programs.

The description is taken once per process, at its start, from the module's own `state_dict`. Of PEFT adapters it has the
stored parameters and the names under which PEFT looks for these; PEFT itself gives the names, and is imported only if
the module is made of PEFT models.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from itertools import chain, zip_longest
from typing import Any, cast

from torch import nn

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.journal import decode, encode, refusals
from lightning_moe_ckpt.operators import StateSchema
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.storage import HuggingFaceEntry, ModuleEntry, ModuleLine

log = rank_logger(__name__)

LEFT_OUT = "left_out"
"""Key of the names that `read_extra` returns for values that could not be stored."""

ADAPTERS = "peft"
"""Key for adapters in `read_extra`'s result."""


def describe(module: nn.Module, schema: StateSchema, extra: Mapping[str, object]) -> ModuleEntry:
    """Return the description of `module`, with the trainer's `extra` entries; values that the codec refuses are left out and named."""
    owners = [*module.named_parameters(), *module.named_buffers()]  # under first names, like records
    names = {id(tensor): name for name, tensor in owners}
    state: Mapping[str, object] = module.state_dict(keep_vars=True)
    stored = {key: names.get(id(value)) for key, value in state.items()}
    groups = schema.optimizer.param_groups
    return ModuleEntry(
        class_name=type(module).__qualname__,
        unsaved=tuple(name for name, _ in owners if name not in stored),
        aliases={key: name for key, name in stored.items() if name is not None and name != key},
        foreign=tuple(key for key, name in stored.items() if name is None),
        optimizer=type(schema.optimizer).__qualname__,
        param_groups=tuple(tuple(names.get(id(param), "") for param in group["params"]) for group in groups),
        hugging_face=tuple(_hugging_face(module)),
        extra=_encoded({**extra, ADAPTERS: describe_adapters(module, names)}),
    )


def describe_stages(
    module: nn.Module, schema: StateSchema, extra: Mapping[str, object], exchange: Exchange, groups: ParallelGroups
) -> ModuleEntry | None:
    """Return one description of all pipeline stages' modules; `None` except on rank 0. Collective."""
    if groups.num_stages == 1:
        return describe(module, schema, extra) if exchange.is_coordinator else None
    said = exchange.gather_values(ModuleLine.of(describe(module, schema, extra)).line)[:: groups.stage_size]
    stages = [ModuleLine(bytes(cast("bytes", each))).read() for each in said]
    if not exchange.is_coordinator:
        return None
    rows = zip_longest(*(stage.param_groups for stage in stages), fillvalue=())
    return replace(
        stages[0],
        unsaved=tuple(chain.from_iterable(stage.unsaved for stage in stages)),
        aliases={name: stored for stage in stages for name, stored in stage.aliases.items()},
        foreign=tuple(chain.from_iterable(stage.foreign for stage in stages)),
        param_groups=tuple(tuple(chain.from_iterable(row)) for row in rows),
        hugging_face=tuple(chain.from_iterable(stage.hugging_face for stage in stages)),
    )


def read_extra(entry: ModuleEntry) -> dict[str, Any]:
    """Return the trainer's entries and, under `left_out`, the names of values that could not be stored. Raises `Corrupt` if the bytes are
    damaged.
    """
    extra: dict[str, Any] = decode(base64.b64decode(entry.extra))
    return extra


def storable(entries: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the entries that the journal's codec takes, of dicts what it takes, and the names of all else."""
    kept: dict[str, object] = {}
    left_out: list[str] = []
    for key, value in entries.items():
        if not refusals(value):
            kept[key] = value
        elif type(value) is dict:
            kept[key] = {name: item for name, item in value.items() if not refusals({name: item})}
            left_out += [f"{key}[{name!r}]" for name in value if name not in kept[key]]  # type: ignore[operator]
        else:
            left_out.append(key)
    return kept, left_out


def _encoded(extra: Mapping[str, object]) -> str:
    kept, left_out = storable(extra)
    if left_out:
        log.info("not part of exported checkpoints, because it is no plain value: %s", ", ".join(left_out))
    return base64.b64encode(encode({**kept, LEFT_OUT: left_out})).decode("ascii")


def _hugging_face(module: nn.Module) -> Iterator[HuggingFaceEntry]:
    """Yield the outermost Hugging Face models in `module`, itself included, without importing transformers."""
    outer: list[str] = []
    for prefix, each in module.named_modules():
        if any(not other or prefix == other or prefix.startswith(f"{other}.") for other in outer):
            continue
        # Not `getattr`: wrappers (torch.compile) pass attributes on, but add to the names of parameters.
        config = vars(each).get("config")
        if hasattr(type(each), "save_pretrained") and hasattr(config, "to_json_string"):
            outer.append(prefix)
            yield _hugging_face_entry(prefix, each, config)


def _hugging_face_entry(prefix: str, model: Any, config: Any) -> HuggingFaceEntry:
    generation = vars(model).get("generation_config")
    return HuggingFaceEntry(
        prefix=prefix,
        class_name=type(model).__name__,
        config=config.to_json_string(),
        generation_config=generation.to_json_string() if hasattr(generation, "to_json_string") else None,
        tied=tuple(_tied(model, config)),
    )


def _tied(model: Any, config: Any) -> list[str]:
    """Return tied names: the model's class takes their values from other parameters if a file lacks them."""
    resolved = getattr(model, "all_tied_weights_keys", None)  # transformers 5
    if resolved is not None:
        return sorted(resolved)
    declared = getattr(model, "_tied_weights_keys", None)
    return sorted(declared or ()) if getattr(config, "tie_word_embeddings", False) else []


def describe_adapters(module: nn.Module, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return a description of the active adapter in each PEFT model in a module, with stored names of its tensors by
    identity: the prefix of its names; the adapter's name and `adapter_config.json`; stored names by name in
    `adapter_model.safetensors`; the products that a merge adds to base weights; and the layers not such products.
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
