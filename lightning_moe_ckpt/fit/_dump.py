"""Store a step's tensors, as safetensors by name: its batches, activations and gradients.

A file per rank and part, `step-N.rank-R.PART.safetensors`. Names say where a tensor is: `0/images` in the step's first
batch; `layers.1.mlp#2` is this module's third output in the step, since micro-batches, recomputation and shared
modules call one several times; parts of an output are `layers.1.mlp#2/0`. Gradients have their parameters' names, and are those
before clipping; of a sharded parameter, this rank's part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.fit.loops._trainer import compiled_modules

PARTS = ("gradients", "activations", "batch")
"""Parts of a step that can be stored."""


class StepDump:
    """Store `parts` of each step on `rank` in the folder `out`; call its methods in the hooks' order."""

    def __init__(self, parts: Collection[str], out: Path, rank: int) -> None:
        self._parts, self._out, self._rank = parts, out, rank
        self._found: dict[str, dict[str, Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def batch_begins(self, module: LightningModule, batch: Any) -> None:
        """Note one of the step's batches; with the first, begin to note outputs of modules, but for compiled ones."""
        if not self._found:
            self._found = {part: {} for part in self._parts}
            if "activations" in self._parts:
                compiled, self._calls = compiled_modules(module), Counter[str]()
                for name, part in module.named_modules():
                    if part is not module and part not in compiled:
                        self._handles.append(part.register_forward_hook(partial(self._output, name)))
            self._batches = 0
        self._note("batch", str(self._batches), batch)
        self._batches += 1

    def before_optimizer_step(self, module: LightningModule) -> None:
        """Note all gradients."""
        for name, param in module.named_parameters():
            if param.grad is not None:
                self._note("gradients", name, param.grad)

    def ends(self, step: int) -> list[str]:
        """Store the parts of the step, and return the files' paths."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        found, self._found, written = self._found, {}, list[str]()
        self._out.mkdir(parents=True, exist_ok=True)
        for part, tensors in found.items():
            path = self._out / f"step-{step}.rank-{self._rank}.{part}.safetensors"
            save_file(tensors, path)
            written.append(str(path))
        return written

    def _output(self, name: str, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        self._note("activations", f"{name}#{self._calls[name]}", output)
        self._calls[name] += 1

    def _note(self, part: str, name: str, value: Any) -> None:
        for path, leaf in pytree.tree_leaves_with_path(value) if part in self._parts else ():
            if isinstance(leaf, Tensor):
                own = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
                own = own.to_local() if hasattr(own, "to_local") else own
                place = "/".join([name, *(str(_key(each)) for each in path)])
                self._found[part][place] = own.to("cpu", copy=True).contiguous()


def _key(entry: Any) -> Any:
    return next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name))
