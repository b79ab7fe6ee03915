"""Build Lightning's own checkpoint from a dense generation, for `load_from_checkpoint` and `Trainer.fit(ckpt_path=...)`.

Everything in it passes `torch.load(weights_only=True)`; values that do not are left out and named.
"""

from __future__ import annotations

import importlib.metadata
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.inspection._assemble import Assembler
from lightning_moe_ckpt.journal import decode_journal
from lightning_moe_ckpt.snapshot import read_extra
from lightning_moe_ckpt.storage import Commit, ModuleEntry

VERSIONS = "lightning_moe_ckpt_versions"
"""Key of an export's operators that have an older step, by name."""


class LightningCheckpoint:
    """Build the content of a `.ckpt` file.

    Args:
        commit: commit of the generation.
        stored: its tensors.
        module: description of the trained module.
    """

    def __init__(self, commit: Commit, stored: Assembler, module: ModuleEntry) -> None:
        self._commit, self._stored, self._module = commit, stored, module
        self.notes: list[str] = []
        """Remarks on the result for the user."""

    def content(self, tensors: Mapping[str, Tensor], *, weights_only: bool) -> dict[str, Any]:
        """Return the content that Lightning would have saved.

        Args:
            tensors: the `state_dict`.
            weights_only: whether to leave out optimizer, schedulers and callbacks, which only training needs.
        """
        extra, start = self._extra(), decode_journal(self._stored.journal()).get("start", {})
        content = {
            **self._plain("on_save_checkpoint", start.get("module") or {}),
            **self._hyper_parameters(extra),
            **self._datamodule(extra, start),
            **({VERSIONS: self._stored.older} if self._stored.older else {}),
            "epoch": _epoch(start),
            "global_step": self._commit.generation.step,
            "pytorch-lightning_version": importlib.metadata.version("lightning"),
            "state_dict": OrderedDict(tensors),
        }
        if start:
            progress = {key: value for key, value in start["loops"].items() if key != "settings"}
            content["loops"] = {"fit_loop": progress, **extra.get("loops", {})}
            if not weights_only:
                content |= self._training(extra, start)
        elif not weights_only:
            self.notes.append("without the journal there is no training state: as with --weights-only")
        return content

    # -- what training needs

    def _training(self, extra: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
        precision = {extra["precision"]: start["precision"]} if extra.get("precision") and start["precision"] else {}
        return {
            **precision,
            "callbacks": self._plain("callbacks", start["callbacks"]),
            "optimizer_states": [self._optimizer(start)],
            "lr_schedulers": [self._plain("a scheduler", scheduler) for scheduler in start["schedulers"]],
        }

    def _optimizer(self, start: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's `state_dict`: parameters by number, in the order of its groups."""
        groups: list[dict[str, Any]] = start["param_groups"]
        ordered = [*self._module.param_groups, *start["trained"]["added"]]
        numbers = {name: number for number, name in enumerate(name for names in ordered for name in names)}
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self._stored.optimizer().items():
            parameter, _, key = name.rpartition("/")
            if parameter not in numbers:
                raise Corrupt(
                    f"`{parameter}` has optimizer state and is in no group of parameters. Verify the generation."
                )
            state.setdefault(numbers[parameter], {})[key] = tensor
        if len(groups) != len(ordered):
            raise Corrupt(
                f"{len(groups)} groups of parameters have settings, {len(ordered)} are described. Verify the generation."
            )
        described = [
            {**self._plain("a parameter group", fields), "params": [numbers[name] for name in names]}
            for fields, names in zip(groups, ordered, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": described}

    # -- what the module and the data module add

    def _hyper_parameters(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for owner in ("", "datamodule_"):
            if f"{owner}hyper_parameters" in extra:
                values = extra[f"{owner}hyper_parameters"]
                found[f"{owner}hyper_parameters"] = self._plain(f"{owner}hyper_parameters", values)
            if f"{owner}hparams_name" in extra:
                found[f"{owner}hparams_name"] = extra[f"{owner}hparams_name"]
        return found

    def _datamodule(self, extra: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
        state = start.get("datamodule")
        return {extra["datamodule"]: self._plain("the data module", state)} if state and "datamodule" in extra else {}

    # -- what is stored

    def _extra(self) -> dict[str, Any]:
        extra = read_extra(self._module)
        if extra["left_out"]:
            self.notes.append(f"left out, because it was no plain value: {', '.join(extra['left_out'])}")
        return extra

    def _plain(self, owner: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the values that `torch.load(weights_only=True)` accepts."""
        unsafe = [key for key, value in values.items() if not _is_plain(value)]
        if unsafe:
            named = ", ".join(map(str, unsafe))
            self.notes.append(f"{named} of {owner} left out: torch.load(weights_only=True) refuses its type")
        return {key: value for key, value in values.items() if key not in unsafe}


def _epoch(start: Mapping[str, Any]) -> int:
    """Return the current epoch, from the progress of the loops."""
    epoch: int = start["loops"]["epoch_progress"]["current"]["processed"] if start else 0
    return epoch


def _is_plain(value: object) -> bool:
    """Return whether `torch.load(weights_only=True)` accepts a value, by exact type: a subclass could be anything."""
    if type(value) in {list, tuple, set}:
        return all(_is_plain(item) for item in value)  # type: ignore[attr-defined]  # checked by type
    if type(value) in {dict, OrderedDict}:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())  # type: ignore[attr-defined]
    return type(value) in {type(None), bool, int, float, str, bytes, Tensor, torch.dtype, torch.Size}
