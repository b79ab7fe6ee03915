"""Checkpoints that `moe-ckpt bench overhead` compares, by name: policies of this package, and other systems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Callback

from lightning_moe_ckpt.benchmarks._peers import ONE_RANK, PEERS, installed
from lightning_moe_ckpt.callbacks import (
    CheckpointArguments,
    DenseCheckpoint,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Variant:
    """Checkpoints that a fit takes."""

    system: str
    """Policy or peer; `none` for no checkpoints, `monitored` for sparse ones beside an `ExpertLoadMonitor`."""
    every: int = 0
    """Steps between two checkpoints; the window of sparse ones."""
    memory_only: bool = False
    """Whether storage rests."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.system}{self.every or ''}{'-memory' if self.memory_only and self.system not in PEERS else ''}"

    @property
    def captures_always(self) -> bool:
        """Whether every step takes something."""
        return self.every < 2 or self.system in ("sparse", "monitored", "differential")

    def skips(self, step: int) -> bool:
        """Return whether nothing is taken at this boundary."""
        return not self.captures_always and step % self.every > 0


_POLICIES = [
    *(Variant("sparse", every, memory) for memory in (True, False) for every in (4, 8)),
    *(Variant("dense", every, memory) for memory in (True, False) for every in (1, 4)),
    *(Variant(system, 1, memory) for memory in (True, False) for system in ("partial", "selective")),
]
_PEERS = [
    *(Variant("dlrover", every, memory_only=True) for every in (1, 4)),
    Variant("lm-resiliency", 4, memory_only=True),
    *(Variant(system, 4) for system in ("lightning", "torch.save", "dcp")),
]
_MORE = [
    *(Variant(system, 4, memory) for system in ("partial", "selective") for memory in (True, False)),
    Variant("monitored", 8),
    *(Variant("differential", 64, memory) for memory in (True, False)),
]
VARIANTS = {each.name: each for each in (Variant("none"), *_POLICIES, *_PEERS, *_MORE)}
"""All that can be measured, by name."""
_BROKEN_DOWN = ["sparse8", "dense1", "dense4", "partial1", "selective1"]


def chosen_variants(options: SimpleNamespace) -> list[Variant]:
    """Return what to measure, training without checkpoints first.

    Raises:
        ConfigurationError: `--variants` names something else, or what is not installed.
    """
    usual = [VARIANTS[name] for name in _BROKEN_DOWN] if options.breakdown else _POLICIES
    peers = [peer for peer in _PEERS if installed(peer.system) and (options.ranks == 1 or peer.system not in ONE_RANK)]
    names = [name for name in (options.variants or "").split(",") if name not in ("", "none")]
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigurationError(f"`--variants {','.join(unknown)}`: there are {', '.join(VARIANTS)}.")
    if missing := [name for name in names if not installed(VARIANTS[name].system)]:
        raise ConfigurationError(f"`--variants {','.join(missing)}`: not installed. Install it, or leave it out.")
    return [VARIANTS["none"], *([VARIANTS[name] for name in names] or [*usual, *peers])]


def checkpoint_of(variant: Variant, url: str) -> Callback | None:
    """Return the callback that saves to `url`, a `file://` for other systems; `None` for no checkpoints."""
    system, every = variant.system, variant.every
    if system in PEERS:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir(parents=True, exist_ok=True)
        return PEERS[system](folder, every_n_steps=every)
    shared: dict[str, Any] = {"resume": "never", **shared_arguments(memory_only=variant.memory_only)}
    if system in ("sparse", "monitored"):
        return SparseCheckpoint(url, window=every, **shared)
    policies = {
        "dense": DenseCheckpoint,
        "differential": DifferentialCheckpoint,
        "partial": PartialExpertCheckpoint,
        "selective": SelectiveExpertCheckpoint,
    }
    return policies[system](url, every_n_steps=every, **shared) if system in policies else None


def shared_arguments(*, memory_only: bool) -> dict[str, Any]:
    """Return arguments for all checkpoint callbacks: in memory they go as fast as they can, as other systems do.

    What measures is a callback, too, with clocks of its own process.
    """
    target = (
        {"overhead_target": None} if memory_only and "overhead_target" in CheckpointArguments.__annotations__ else {}
    )
    return {"untouched": ["callback.*"], **target}
