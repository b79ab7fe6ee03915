"""What is trained and killed in the quality benchmark, one life of it, and what a life writes down on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import Lines, bench_trainer, own_memory, quiet_lightning
from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize
from lightning_moe_ckpt.benchmarks._quality_model import TextModel, training_text, validation_text
from lightning_moe_ckpt.callbacks import (
    CapacityBoost,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.testing import Attempt

System = Literal["none", "control", "sparse", "partial", "dynamic", "selective", "ablation"]
"""`control` is `none` with weights that differ by a rounding at the start: what chaos alone does to the loss."""
Loss = Literal["nothing", "process", "node"]
"""What a fault takes: the process; with it the memory of its node, so that storage is all there is."""
QualityCheckpoint = PartialExpertCheckpoint | SelectiveExpertCheckpoint | SparseCheckpoint
RecordLine = dict[str, Any]

_STATE_NBYTES = 12
"""Per parameter: fp32 weights with both moments."""
_WINDOW = 6
"""Of sparse checkpoints."""
_SNAPSHOT_K = 2
"""Experts per layer that partial generations take to memory, where storage gets one; or the bytes of so many."""
_PLT_BUDGET = 0.05
"""Of Dynamic-K, as PEC has it."""
_NUDGE = 1e-6
"""Relative change of weights in the control."""
_PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    system: System
    loss: Loss = "nothing"
    boosted: bool = False
    """With `CapacityBoost`."""

    @property
    def is_partial(self) -> bool:
        """Whether restarts are not exact."""
        return self.system in ("partial", "dynamic", "selective", "ablation")


CASES = (
    Case(system="none"),
    Case(system="control"),
    Case(system="sparse", loss="node"),
    Case(system="partial", loss="node"),
    Case(system="partial", loss="process"),
    Case(system="dynamic", loss="node"),
    Case(system="dynamic", loss="process"),
    Case(system="dynamic", loss="node", boosted=True),
    Case(system="selective", loss="node"),
    Case(system="selective", loss="process"),
    Case(system="selective", loss="node", boosted=True),
    Case(system="selective", loss="process", boosted=True),
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
    """Steps between two partial generations."""
    keep: int = 2
    """Generations that storage keeps, besides what they refer to."""
    size: ModelSize = field(
        default_factory=lambda: ModelSize(
            num_blocks=3, model_dim=64, num_experts=12, expert_dim=128, batch_size=8, capacity_factor=2.5, balance=0.0
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
        layers = [sum(p.numel() for _, p in layer.expert_parameters()) for layer in model.moe_layers()]
        expert = layers[0] // self.size.num_experts
        # Nearly an expert more than that, for the journal and headers.
        return _STATE_NBYTES * (self.size.num_params() - sum(layers) + k * len(layers) * expert + expert * 9 // 10)


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


@dataclass(frozen=True, kw_only=True)
class QualityFit:
    """A run that is killed and resumed."""

    case: Case
    scale: Scale
    seed: int
    memory: str
    """Folder on a tmpfs that is the shared memory of the node."""
    record: str
    """File to which every life appends."""
    accelerator: Accelerator

    def __call__(self, life: Attempt) -> RecordLine:
        """Run a life. Returns nothing: what was seen is in the record, beside that of lives that were killed."""
        own_memory(self.memory, lost=life.index > 0 and self.case.loss == "node")
        # Another seed in every life but the first: what is not restored shows.
        seed_everything(self.seed + 7919 * life.index, verbose=False)
        model = TextModel(self.scale.size, self.scale.steps)
        if self.case.system == "control":
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 1 + _NUDGE)
        checkpoint = self._checkpoint(life.url)
        boost = CapacityBoost() if self.case.boosted else None
        record = QualityRecord(self, checkpoint, boost, resumed=life.index > 0)
        own: list[Callback] = [callback for callback in (checkpoint, boost, record) if callback is not None]
        with quiet_lightning():
            callbacks = life.callbacks(*own)
            trainer = bench_trainer(accelerator=self.accelerator, callbacks=callbacks, max_steps=self.scale.steps)
            # One batch more than it takes, so that no epoch ends.
            trainer.fit(model, training_text(self.scale.size, self.scale.steps + 1, self.seed))
        return {}

    def _checkpoint(self, url: str) -> QualityCheckpoint | None:
        scale, keep, system = self.scale, self.scale.keep, self.case.system
        if system == "sparse":
            return SparseCheckpoint(url, window=_WINDOW, keep=keep)
        if system == "selective":
            local, remote, every = scale.budget(_SNAPSHOT_K), scale.budget(1), scale.every
            return SelectiveExpertCheckpoint(
                url, every_n_steps=every, local_budget=local, remote_budget=remote, keep=keep
            )
        if self.case.is_partial:
            every = scale.ablation_every if system == "ablation" else scale.every
            limit = _PLT_BUDGET if system == "dynamic" else None
            return PartialExpertCheckpoint(
                url, every_n_steps=every, snapshot_k=_SNAPSHOT_K, plt_budget=limit, keep=keep
            )
        return None


class QualityRecord(Callback):
    """Appends a line for every step and every validation.

    It also waits, before each optimizer step, until the generation before it is durable: what a fault costs must depend
    on the policy, not on how busy the disk is.

    Args:
        fit: what is run.
        checkpoint: whose figures are taken, if there is one.
        boost: likewise.
        resumed: whether a life came before this one.
    """

    def __init__(
        self, fit: QualityFit, checkpoint: QualityCheckpoint | None, boost: CapacityBoost | None, *, resumed: bool
    ) -> None:
        self._scale, self._is_partial = fit.scale, fit.case.is_partial
        self._checkpoint, self._boost = checkpoint, boost
        # A replayed step has weights that are not all there yet, and was validated by the life that took it.
        self._done = {line["step"] for line in Lines.read(fit.record, "validation")} if not self._is_partial else set()
        self._lines = Lines(fit.record)
        self._crops_NT = validation_text(fit.scale.size, fit.scale.val_crops)
        self._look_at_once = resumed and self._is_partial
        # What others have right after a recovery is held against what the fault-free run has at that step.
        self._beside = set(fit.scale.kill_steps(fit.seed)) if fit.case.system == "none" else set()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self._look_at_once:
            self._look_at_once = False
            self._validate("resumed", trainer, pl_module)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        if self._is_partial and self._checkpoint is not None and not self._checkpoint.wait_committed(_PATIENCE):
            raise TimeoutError(f"No generation became durable in {_PATIENCE:g} s.")

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        step = trainer.global_step
        debts = [tokens for row in self._boost.debts.values() for tokens in row] if self._boost is not None else []
        self._lines.write("step", step=step, boosted=sum(map(bool, debts)), debt=sum(debts))
        if (step % self._scale.val_every == 0 or step == self._scale.steps) and step not in self._done:
            self._validate("validation", trainer, pl_module)
        if step in self._beside:
            self._validate("beside", trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TextModel)
        layers = pl_module.moe_layers()
        tokens, drops = (
            [getattr(layer, f"{what}_per_expert").tolist() for layer in layers] for what in ("tokens", "drops")
        )
        self._lines.write("end", tokens=tokens, drops=drops, **_figures(self._checkpoint))

    def _validate(self, what: str, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, TextModel)
        self._lines.write(what, step=trainer.global_step, bits=module.bits_per_byte(self._crops_NT))


def _figures(checkpoint: QualityCheckpoint | None) -> RecordLine:
    """Of the life that ends; the accounting is that of the whole run."""
    if checkpoint is None:
        return {}
    report, lost = checkpoint.report, checkpoint.report.lost
    whole = max(1, report.steps) * report.dense_nbytes
    found = {"captured": report.nbytes_captured / whole, "persisted": report.nbytes_persisted / whole}
    if lost is None:
        return found
    counted = ("plt", "mlt", "k", "lost", "processed")
    return {**found, **{name: getattr(lost, name) for name in counted}, "lossy_faults": lost.faults}
