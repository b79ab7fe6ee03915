"""Write a dense generation as a folder for `from_pretrained` of transformers, or of PEFT, without importing either.

Names are those of the model in memory. `from_pretrained` of the version that trained it accepts them, beside the names
that its own `save_pretrained` uses. An adapter is written alone, or added to the weights of its base; sums are those of
PEFT's `merge_and_unload`, operation by operation, so that they have the same bits.
"""

from __future__ import annotations

import json
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._assemble import Assembler, StoredTensor
from lightning_moe_ckpt.snapshot import ADAPTERS, read_extra
from lightning_moe_ckpt.storage import HuggingFaceEntry, ModuleEntry

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def choose_model(module: ModuleEntry, prefix: str | None) -> HuggingFaceEntry:
    """Return the Hugging Face model in a trained module; `prefix` names it there, and is needed if there are several. Raises
    `ConfigurationError` if there is no model, or `prefix` does not choose one.
    """
    if not (models := {each.prefix: each for each in module.hugging_face}):
        raise ConfigurationError(
            f"`{module.class_name}` holds no Hugging Face model, so it cannot become a folder for `from_pretrained`. "
            "Give an OUT that ends in .safetensors or .ckpt."
        )
    if prefix is None and len(models) == 1:
        return next(iter(models.values()))
    if prefix not in models:
        listed = ", ".join(f"{model.prefix!r} ({model.class_name})" for model in models.values())
        raise ConfigurationError(
            f"`{module.class_name}` holds the Hugging Face models {listed}. Give --module one of these."
        )
    return models[prefix]


def model_names(names: Mapping[str, str], model: HuggingFaceEntry) -> dict[str, str]:
    """Return the names inside the model, each with its stored name.

    Tied names are left out where the model's class finds the other name; tied names that the class would not find are copies.
    """
    head = f"{model.prefix}." if model.prefix else ""
    inside = {name.removeprefix(head): stored for name, stored in names.items() if name.startswith(head)}
    kept = {name: stored for name, stored in inside.items() if name not in model.tied}
    found = set(kept.values())
    return {name: stored for name, stored in inside.items() if name in kept or stored not in found}


def plan_shards(sizes: Mapping[str, int], max_nbytes: int) -> dict[str, list[str]]:
    """Return the names by file, filled in order up to `max_nbytes`; a tensor larger than that has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled + nbytes > max_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def write_folder(
    out: Path, model: HuggingFaceEntry, names: Mapping[str, str], tensors: Assembler | Adapter, *, max_shard_nbytes: int
) -> list[Path]:
    """Write weights, their index if there are several files, and configurations to an existing folder, one file's tensors at a
    time. Return the files; the configuration comes last: a folder with a configuration is complete.

    `names` are those of `model_names`.
    """
    stored = tensors.stored
    sizes = {name: stored[names[name]].nbytes for name in names}
    shards = plan_shards(sizes, max_shard_nbytes)
    # `from_pretrained` could take weights of an earlier export for part of this one.
    named = (out / name for name in (CONFIG, "model.safetensors", _INDEX))
    for stale in (*named, *out.glob("model-[0-9]*-of-[0-9]*.safetensors")):
        stale.unlink(missing_ok=True)
    for file, inside in shards.items():
        save_safetensors(out / file, {name: tensors.read(names[name]) for name in inside}, {"format": "pt"})
    texts = dict(_documents(model, [stored[each] for each in names.values()]))
    if len(shards) > 1:
        weight_map = {name: file for file, inside in shards.items() for name in inside}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        texts = {_INDEX: _text(index), **texts}
    for file, text in texts.items():
        write_whole(out / file, partial(write_text, text))
    return [out / file for file in (*shards, *texts)]


def _documents(model: HuggingFaceEntry, tensors: Sequence[StoredTensor]) -> Iterator[tuple[str, str]]:
    if model.generation_config is not None:
        yield "generation_config.json", model.generation_config
    config = json.loads(model.config)
    floats = [_DTYPES[tensor.dtype] for tensor in tensors if tensor.dtype in _DTYPES]
    config["architectures"] = [model.class_name]
    if floats:
        # `from_pretrained` converts to this: the type of the first weights, as `save_pretrained` has it.
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = floats[0]
    yield CONFIG, _text(config)


def _text(document: object) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def write_text(text: str, path: Path) -> None:
    """Write text to a file, for `write_whole`."""
    path.write_text(text, encoding="utf-8")


def save_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors to a file. Raises `ConfigurationError` if it cannot be written."""
    write_whole(path, lambda temporary: safetensors.torch.save_file(tensors, temporary, metadata))


def write_whole(path: Path, save: Callable[[Path], None]) -> None:
    """Write to a temporary name and rename: a named file is complete. Rights follow the umask. Raises `ConfigurationError`."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch()  # as the umask has it; safetensors makes files that only this user reads
        rights = stat.S_IMODE(temporary.stat().st_mode)
        save(temporary)
        temporary.chmod(rights)
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapter:
    """Adapter, by its description from `describe_adapters`, and its base's weights with the adapter's sums."""

    def __init__(self, described: Mapping[str, Any], tensors: Assembler) -> None:
        self.name, self.config = str(described["adapter"]), str(described["config"])
        self.keys: Mapping[str, str] = described["keys"]
        """Stored names by the names in `adapter_model.safetensors`."""
        self._others, self._tensors = described["others"], tensors
        self._sums = {each["weight"]: each for each in described["sums"]}

    @classmethod
    def of(cls, module: ModuleEntry, model: HuggingFaceEntry, tensors: Assembler) -> Adapter | None:
        """Return the adapter that a Hugging Face model was trained with; `None` if it has none."""
        for each in read_extra(module).get(ADAPTERS, []):
            if model.prefix == ".".join(part for part in (each["prefix"], "base_model.model") if part):
                return cls(each, tensors)
        return None

    def base_names(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the base's names without PEFT, each with its stored name, from the names within PEFT. Raises `ConfigurationError` if a
        trained tensor is no sum with weights of the base.
        """
        if self._others:
            raise ConfigurationError(
                f"`--merge`: {', '.join(self._others[:4])} cannot be added to weights of the base here. Export without it, "
                "and let PEFT merge: `PeftModel.from_pretrained(base, FOLDER).merge_and_unload()`."
            )
        trained = f".modules_to_save.{self.name}."
        found = {name.replace(trained, "."): stored for name, stored in names.items() if trained in name}
        for name, stored in names.items():
            if not (".lora_" in name or ".modules_to_save." in name or ".original_module." in name):
                found[name.replace(".base_layer", "")] = stored
            elif ".original_module." in name:
                found.setdefault(name.replace(".original_module.", "."), stored)
        return found

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Return the stored tensors of the generation."""
        return self._tensors.stored

    def read(self, name: str) -> Tensor:
        """Read a weight of the base, with the adapter's sum."""
        weight, added = self._tensors.read(name), self._sums.get(name)
        if added is None:
            return weight
        a, b = self._tensors.read(added["a"]), self._tensors.read(added["b"])
        weight += _product(a, b, added, weight)
        return weight


def write_adapter(out: Path, adapter: Adapter, tensors: Assembler) -> list[Path]:
    """Write an adapter alone to a folder, and return the files; the configuration comes last."""
    weights, config = out / ADAPTER_WEIGHTS, out / ADAPTER_CONFIG
    config.unlink(missing_ok=True)
    save_safetensors(weights, {key: tensors.read(stored) for key, stored in adapter.keys.items()}, {"format": "pt"})
    write_whole(config, lambda path: write_text(adapter.config + "\n", path))
    return [weights, config]


def _product(a: Tensor, b: Tensor, added: Mapping[str, Any], weight: Tensor) -> Tensor:
    experts, dtype = added["experts"], b.dtype
    product: Tensor
    if experts > 1:
        a_ERI, b_ORE = a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts)
        terms = "o r e, e r i -> e o i" if added["swapped"] else "o r e, e r i -> e i o"
        product = torch.einsum(terms, b_ORE, a_ERI) * added["scaling"]
        return product.to(weight.dtype)
    narrow = dtype in {torch.float16, torch.bfloat16}  # which PEFT multiplies in float32 on the CPU
    found = b.float() @ a.float() if narrow else b @ a
    product = (found.T if added["transposed"] else found) * added["scaling"]
    return product.to(dtype)
