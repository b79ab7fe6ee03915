"""One life of a fit on text that is killed and resumed, and what it writes down on the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import quiet_lightning
from lightning_moe_ckpt.benchmarks._quality_cases import Case, Scale
from lightning_moe_ckpt.benchmarks._quality_model import TextModel, training_text, validation_text
from lightning_moe_ckpt.callbacks import (
    CapacityBoost,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import Life

CheckpointCallback = PartialExpertCheckpoint | SelectiveExpertCheckpoint | SparseCheckpoint
Line = dict[str, Any]

_WINDOW = 6
"""Of sparse checkpoints."""
_SNAPSHOT_K = 2
"""Experts per layer that lossy generations take to memory, where storage gets one; or the bytes of so many."""
_PLT_BUDGET = 0.05
"""Of Dynamic-K, as PEC has it."""
_NUDGE = 1e-6
"""Relative change of weights in the control."""
_PATIENCE = 60.0


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

    def __call__(self, life: Life) -> Line:
        """What a life runs. Returns nothing: what was seen is in the record, beside that of lives that were killed."""
        memory = Path(self.memory)
        if life.index and self.case.loss == "node":
            shutil.rmtree(memory, ignore_errors=True)
        memory.mkdir(exist_ok=True)
        os.environ["MOE_CKPT_SHARED_MEMORY"] = str(memory)
        # Another seed in every life but the first: what is not restored shows.
        seed_everything(self.seed + 7919 * life.index, verbose=False)
        model = TextModel(self.scale.size, self.scale.steps)
        if self.case.system == "control":
            _nudge(model)
        checkpoint = self._checkpoint(life.url)
        boost = CapacityBoost() if self.case.boosted else None
        record = QualityRecord(self, checkpoint, boost, resumed=life.index > 0)
        own: list[Callback] = [callback for callback in (checkpoint, boost, record) if callback is not None]
        with quiet_lightning():
            trainer = self._trainer(life.callbacks(*own))
            # One batch more than it takes, so that no epoch ends.
            trainer.fit(model, training_text(self.scale.size, self.scale.steps + 1, self.seed))
        return {}

    def _checkpoint(self, url: str) -> CheckpointCallback | None:
        scale, keep = self.scale, self.scale.keep
        every = scale.ablation_every if self.case.system == "ablation" else scale.every
        if self.case.system == "sparse":
            return SparseCheckpoint(url, window=_WINDOW, keep=keep)
        if self.case.system == "selective":
            local, remote = scale.budget(_SNAPSHOT_K), scale.budget(1)
            return SelectiveExpertCheckpoint(
                url, every_n_steps=every, local_budget=local, remote_budget=remote, keep=keep
            )
        if self.case.lossy:
            limit = _PLT_BUDGET if self.case.system == "dynamic" else None
            return PartialExpertCheckpoint(
                url, every_n_steps=every, snapshot_k=_SNAPSHOT_K, plt_budget=limit, keep=keep
            )
        return None

    def _trainer(self, callbacks: list[Callback]) -> Trainer:
        return Trainer(
            accelerator=self.accelerator,
            devices=1,
            strategy=MoEStrategy(),
            callbacks=callbacks,
            max_steps=self.scale.steps,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=True,
            enable_progress_bar=False,
            enable_model_summary=False,
        )


class QualityRecord(Callback):
    """Appends a line for every step and every validation, each with one `write`, so that they outlive a SIGKILL.

    It also waits, before each optimizer step, until the generation before it is durable: what a fault costs must depend
    on the policy, not on how busy the disk is.

    Args:
        fit: what is run.
        checkpoint: whose figures are taken, if there is one.
        boost: likewise.
        resumed: whether a life came before this one.
    """

    def __init__(
        self, fit: QualityFit, checkpoint: CheckpointCallback | None, boost: CapacityBoost | None, *, resumed: bool
    ) -> None:
        self._scale, self._lossy = fit.scale, fit.case.lossy
        self._checkpoint, self._boost = checkpoint, boost
        # A replayed step has weights that are not all there yet, and was validated by the life that took it.
        self._done = {line["step"] for line in read_record(fit.record, "validation")} if not self._lossy else set()
        self._file = os.open(fit.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        self._crops_NT = validation_text(fit.scale.size, fit.scale.val_crops)
        self._look_at_once = resumed and self._lossy
        # What others have right after a recovery is held against what the fault-free run has at that step.
        self._beside = set(fit.scale.kill_steps(fit.seed)) if fit.case.system == "none" else set()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._look_at_once:
            self._look_at_once = False
            self._validate("resumed", trainer, pl_module)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        if self._lossy and self._checkpoint is not None and not self._checkpoint.wait_committed(_PATIENCE):
            raise TimeoutError(f"No generation became durable in {_PATIENCE:g} s.")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        debts = [tokens for row in self._boost.debts.values() for tokens in row] if self._boost is not None else []
        self._write("step", step=step, boosted=sum(map(bool, debts)), debt=sum(debts))
        if (step % self._scale.val_every == 0 or step == self._scale.steps) and step not in self._done:
            self._validate("validation", trainer, pl_module)
        if step in self._beside:
            self._validate("beside", trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TextModel)
        layers = pl_module.moe_layers()
        self._write(
            "end",
            tokens=[layer.tokens_per_expert.tolist() for layer in layers],
            drops=[layer.drops_per_expert.tolist() for layer in layers],
            **_figures(self._checkpoint),
        )

    def _validate(self, what: str, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, TextModel)
        self._write(what, step=trainer.global_step, bits=module.bits_per_byte(self._crops_NT))

    def _write(self, what: str, **values: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, **values}) + "\n").encode())


def read_record(path: str | Path, *kinds: str) -> Iterable[Line]:
    """The lines of all lives so far, in the order in which they were written; of some kinds only."""
    if not Path(path).exists():
        return
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        line: Line = json.loads(text)
        if line["what"] in kinds:
            yield line


def _nudge(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + _NUDGE)


def _figures(checkpoint: CheckpointCallback | None) -> Line:
    """Of the life that ends; the accounting is that of the whole run."""
    if checkpoint is None:
        return {}
    report = checkpoint.report
    captured = report.nbytes_captured / max(1, report.steps) / report.dense_nbytes
    persisted = report.nbytes_persisted / max(1, report.steps) / report.dense_nbytes
    lost = report.lost
    if lost is None:
        return {"captured": captured, "persisted": persisted}
    return {
        "captured": captured,
        "persisted": persisted,
        "plt": lost.plt,
        "mlt": lost.mlt,
        "k": lost.k,
        "faults": lost.faults,
        "lost": lost.lost,
        "processed": lost.processed,
    }
