"""Export adapters of PEFT: alone, for `PeftModel.from_pretrained`, or added to the weights of their base.

Sums are those of PEFT's `merge_and_unload`, operation by operation, so that they have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection._assemble import Assembler, StoredTensor
from lightning_moe_ckpt.inspection._hugging_face import save_safetensors, write_text, write_whole
from lightning_moe_ckpt.snapshot import ADAPTERS, read_extra
from lightning_moe_ckpt.storage import HuggingFaceEntry, ModuleEntry

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Adapter:
    """An adapter, and the weights of its base with what it adds to them.

    Args:
        described: what `describe_adapters` returned of it.
        tensors: of the generation.
    """

    def __init__(self, described: Mapping[str, Any], tensors: Assembler) -> None:
        self.name, self.config = str(described["adapter"]), str(described["config"])
        self.keys: Mapping[str, str] = described["keys"]
        """Stored names by those in `adapter_model.safetensors`."""
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
        """Return the names that the base has without PEFT, each with its stored name.

        Args:
            names: those that it has within PEFT.

        Raises:
            ConfigurationError: some of what was trained is no sum with weights of the base.
        """
        if self._others:
            raise ConfigurationError(
                f"`--merge`: {', '.join(self._others[:4])} cannot be added to weights of the base here. Export without it, "
                "and let PEFT merge: `PeftModel.from_pretrained(base, FOLDER).merge_and_unload()`."
            )
        found: dict[str, str] = {}
        trained = f".modules_to_save.{self.name}."
        for name, stored in names.items():
            if trained in name:
                found[name.replace(trained, ".")] = stored
        for name, stored in names.items():
            if not (".lora_" in name or ".modules_to_save." in name or ".original_module." in name):
                found[name.replace(".base_layer", "")] = stored
            elif ".original_module." in name:
                found.setdefault(name.replace(".original_module.", "."), stored)
        return found

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Return what `Assembler.stored` does."""
        return self._tensors.stored

    def read(self, name: str) -> Tensor:
        """Read a weight of the base, with what the adapter adds to it."""
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
