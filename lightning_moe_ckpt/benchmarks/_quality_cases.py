"""What is trained and killed in the quality benchmark: the policies, what a fault takes from each, and when faults are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch

from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize

System = Literal["none", "control", "sparse", "partial", "dynamic", "selective", "ablation"]
"""`control` is `none` with weights that differ by a rounding at the start: what chaos alone does to the loss."""
Loss = Literal["nothing", "process", "node"]
"""What a fault takes: the process; with it the memory of its node, so that storage is all there is."""

_STATE_NBYTES = 12
"""Per parameter: fp32 weights with both moments."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    system: System
    loss: Loss = "nothing"
    boosted: bool = False
    """With `CapacityBoost`."""

    @property
    def lossy(self) -> bool:
        """Whether restarts are not exact."""
        return self.system in ("partial", "dynamic", "selective", "ablation")


CASES = (
    Case(system="none"),
    Case(system="control"),
    Case(system="sparse", loss="node"),
    *(Case(system="partial", loss=loss) for loss in ("node", "process")),
    *(Case(system="dynamic", loss=loss) for loss in ("node", "process")),
    Case(system="dynamic", loss="node", boosted=True),
    *(Case(system="selective", loss=loss) for loss in ("node", "process")),
    *(Case(system="selective", loss=loss, boosted=True) for loss in ("node", "process")),
    Case(system="ablation", loss="node"),
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is trained, and how often it is killed."""

    steps: int = 450
    faults: int = 4
    val_every: int = 30
    """Steps between two points of the curve."""
    val_crops: int = 128
    every: int = 1
    """Steps between two lossy generations."""
    keep: int = 2
    """Generations that storage keeps, besides what they borrow from."""
    size: ModelSize = field(
        default_factory=lambda: ModelSize(
            num_blocks=3,
            model_dim=64,
            num_experts=12,
            expert_dim=128,
            batch_size=8,
            capacity_factor=2.5,
            balance=0.0,
        )
    )

    @property
    def ablation_every(self) -> int:
        """Steps between two generations of the ablation: in the whole run no expert is saved more than twice or so."""
        return max(1, self.steps // (2 * self.size.num_experts))

    def kill_steps(self, seed: int) -> list[int]:
        """Steps at which faults strike: drawn once per seed, one from each equal part of the middle of the run."""
        draw = random.Random(f"faults of seed {seed}")
        begin, end = self.steps // 5, self.steps * 9 // 10
        edges = [begin + (end - begin) * i // self.faults for i in range(self.faults + 1)]
        return [draw.randrange(low, high) for low, high in pairwise(edges)]

    def budget(self, k: int) -> int:
        """Bytes of a generation with the dense part and `k` experts per layer: what a partial one of that K has."""
        with torch.device("meta"):
            model = BenchModel(self.size)
        num_params = sum(parameter.numel() for parameter in model.parameters())
        layers = [sum(p.numel() for _, p in layer.expert_parameters()) for layer in model.moe_layers()]
        expert = layers[0] // self.size.num_experts
        # Nearly an expert more than that, for the journal and headers.
        return _STATE_NBYTES * (num_params - sum(layers) + k * len(layers) * expert + expert * 9 // 10)


QUICK = Scale(
    steps=16,
    faults=1,
    val_every=8,
    val_crops=8,
    size=ModelSize(
        num_blocks=1,
        model_dim=32,
        num_experts=4,
        expert_dim=32,
        context=16,
        batch_size=4,
        capacity_factor=1.0,
        balance=0.0,
    ),
)
"""Shows that everything runs; what it says about quality means nothing."""
