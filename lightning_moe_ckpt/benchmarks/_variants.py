"""Checkpoints that `moe-ckpt bench overhead` compares, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Callback

from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Variant:
    """Checkpoints of a fit."""

    system: str
    """Policy; `none` for no checkpoints, `monitored` for sparse ones beside an `ExpertLoadMonitor`."""
    every: int = 0
    """Steps between two checkpoints; the window of sparse ones. 0 for the default."""
    memory_only: bool = False
    """Whether storage rests."""
    shard_optimizer: bool = False
    """Whether each rank keeps the optimizer's state for a piece of every parameter."""
    strategy: str = ""
    """`ddp`, or the `gradient_reduction` of `MoEStrategy`; empty for trainings beside checkpoints."""
    make: Callable[[Path], Callback] | None = None
    """Maker of another system's callback, from its folder."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        if self.strategy:
            return self.strategy
        if self.shard_optimizer:
            return f"zero1-{replace(self, shard_optimizer=False).name}"
        return f"{self.system}{self.every or ''}{'-memory' if self.memory_only else ''}"

    def skips(self, step: int) -> bool:
        """Return whether nothing is taken at this boundary."""
        return not (self.every < 2 or self.system in ("sparse", "monitored", "differential")) and step % self.every > 0


_POLICIES = [
    *(Variant("sparse", every, memory) for memory in (True, False) for every in (4, 8)),
    *(Variant("dense", every, memory) for memory in (True, False) for every in (1, 4)),
    *(Variant(system, 1, memory) for memory in (True, False) for system in ("partial", "selective")),
]
_MORE = [
    *(Variant(system, 4, memory) for system in ("partial", "selective") for memory in (True, False)),
    Variant("monitored", 8),
    *(Variant(system) for system in ("sparse", "dense")),
    *(Variant("differential", 64, memory) for memory in (True, False)),
    Variant("none", shard_optimizer=True),
    *(Variant(system, every, True, True) for system, every in (("sparse", 8), ("dense", 1), ("dense", 4))),
]
VARIANTS = {each.name: each for each in (Variant("none"), *_POLICIES, *_MORE)}
"""All variants by name."""


def chosen_variants(options: SimpleNamespace) -> list[Variant]:
    """Return the variants to measure, no checkpoints first. Raises `ConfigurationError` if `--variants` names an unknown one."""
    known = {**VARIANTS, **getattr(options, "others", {})}
    names = [name for name in (options.variants or "").split(",") if name not in ("", "none")]
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"`--variants {','.join(unknown)}`: there are {', '.join(known)}.")
    return [known["none"], *([known[name] for name in names] or _POLICIES)]


def checkpoint_of(variant: Variant, url: str, **more: Any) -> Callback | None:
    """Return the callback that saves to `url`, a `file://` for other systems; `None` for no checkpoints. `more` goes to those of ours."""
    if variant.make is not None:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir(parents=True, exist_ok=True)
        return variant.make(folder)
    system, every = variant.system, variant.every
    shared: dict[str, Any] = {"resume": "never", **shared_arguments(memory_only=variant.memory_only), **more}
    if system in ("sparse", "monitored"):
        return SparseCheckpoint(url, window=every or "auto", **shared)
    policies = {
        "dense": DenseCheckpoint,
        "differential": DifferentialCheckpoint,
        "partial": PartialExpertCheckpoint,
        "selective": SelectiveExpertCheckpoint,
    }
    return policies[system](url, **{"every_n_steps": every} if every else {}, **shared) if system in policies else None


def shared_arguments(*, memory_only: bool) -> dict[str, Any]:
    """Return arguments for all checkpoint callbacks: in memory they go as fast as they can, as other systems do.

    The measuring callback has clocks of its own process.
    """
    return {"untouched": ["callback.*"], **({"overhead_target": None} if memory_only else {})}
