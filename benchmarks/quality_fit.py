"""A run of the quality benchmark that is killed and resumed: model, text, policies, and the lines that attempts write.

The model is a byte-level GPT with experts that overflow. The text is on every machine: the source of Python's own library.
It differs between Python versions, so losses compare within one version only. Whole files go to validation or training
by a hash of their content, so that no validation text was trained on.
"""

from __future__ import annotations

import hashlib
import math
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.steps import lines_of
from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    bench_trainer,
    own_memory,
    quiet_lightning,
)
from lightning_moe_ckpt.callbacks import (
    CapacityBoost,
    CheckpointArguments,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.native._gradient import GradientCompression
from lightning_moe_ckpt.policies import DifferentialMode
from lightning_moe_ckpt.policies._partial import ExpertOrder
from lightning_moe_ckpt.testing import Attempt, Seam
from lightning_moe_ckpt.testing._records import JsonLines, Record

System = Literal[
    "none",
    "control",
    "sparse",
    "differential",
    "bf16",
    "compressed",
    "feedback",
    "partial",
    "dynamic",
    "selective",
    "ablation",
]
"""`control` is `none` with weights that differ by a rounding at the start: what chaos alone does to the loss. `bf16`,
`compressed` and, with error feedback, `feedback` are `differential` with gradients that are not kept as they are."""
EXACT: tuple[System, ...] = ("sparse", "differential")
"""Those whose restarts have equal bits."""
Loss = Literal["nothing", "process", "node"]
"""A fault takes the process; with it, for `node`, the memory of its node, so that storage is all there is."""
QualityCheckpoint = DifferentialCheckpoint | PartialExpertCheckpoint | SelectiveExpertCheckpoint | SparseCheckpoint
_STATE_NBYTES = 12
"""Bytes per parameter: fp32 weights with both moments."""
_WINDOW = 6
"""Window of sparse checkpoints."""
_MODES: dict[System, DifferentialMode] = {
    "differential": "lossless",
    "bf16": "bf16",
    "compressed": "compressed",
    "feedback": "compressed",
}
_BASE_EVERY = 50
"""Steps between two full snapshots of differential ones, as TierCheck has it."""
_SMALL_NUMEL = 2000
"""Elements below which a gradient becomes INT8, in the place of 100,000: the experts of this model have 8,192, and are to be
sparse as those of a large one."""
_SNAPSHOT_K = 2
_PLT_BUDGET = 0.05
"""Budget of Dynamic-K, as PEC has it."""
_NUDGE = 1e-6
"""Relative change of weights in the control."""
_PATIENCE = 60.0
_LEFT_OUT = {"site-packages", "dist-packages", "test", "encodings", "pydoc_data"}
_VALIDATION_SHARE = 10
"""One file in ten."""
_LEARNING_RATE, _WARM_UP = 4e-3, 20
"""Those of the text example."""
_VALIDATION_SEED = 10**6
"""Validation crops are the same in every run."""
_VALIDATION_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    system: System
    loss: Loss = "nothing"
    boosted: bool = False
    """Whether it has `CapacityBoost`."""
    k: int = 1
    """Experts per layer that partial generations take to storage."""
    snapshot_k: int = _SNAPSHOT_K
    """Those that they take to memory; or the bytes of so many."""
    every: int = 1
    """Steps between two partial generations."""
    select: ExpertOrder = "sequential"
    """Which come first."""
    kills: tuple[int, ...] | None = None
    """Steps at which faults strike; `None` for those that are drawn once per seed."""
    with_tasks: bool = False
    """Whether the trained model is given tasks."""

    @property
    def is_partial(self) -> bool:
        """Whether a restart takes experts back to older steps than the rest."""
        return self.system in ("partial", "dynamic", "selective", "ablation")

    def kill_steps(self, scale: Scale, seed: int) -> list[int]:
        """Return the steps at which faults strike."""
        if self.loss == "nothing":
            return []
        return scale.kill_steps(seed) if self.kills is None else list(self.kills)


CASES = (
    Case(system="none"),
    Case(system="control"),
    Case(system="sparse", loss="node"),
    Case(system="differential", loss="node"),
    Case(system="differential", loss="process"),
    Case(system="bf16", loss="node"),
    Case(system="bf16", loss="process"),
    Case(system="compressed", loss="node"),
    Case(system="compressed", loss="process"),
    Case(system="feedback", loss="node"),
    Case(system="feedback", loss="process"),
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


_SIZE = ModelSize(
    num_blocks=3, model_dim=64, num_experts=12, expert_dim=128, batch_size=8, capacity_factor=2.5, balance=0.0
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Amount of training, and number of kills."""

    steps: int = 450
    faults: int = 4
    val_every: int = 30
    """Steps between two points of the curve."""
    val_crops: int = 128
    keep: int = 2
    """Generations that storage keeps, besides what they refer to."""
    size: ModelSize = _SIZE

    @property
    def ablation_every(self) -> int:
        """Steps between two generations of the ablation: in the whole run no expert is saved more than twice or so."""
        return max(1, self.steps // (2 * self.size.num_experts))

    def kill_steps(self, seed: int) -> list[int]:
        """Return the steps at which faults strike: one from each equal part of the middle of the run, drawn once per seed."""
        draw = random.Random(f"faults of seed {seed}")
        begin, end = self.steps // 5, self.steps * 9 // 10
        edges = [begin + (end - begin) * i // self.faults for i in range(self.faults + 1)]
        return [draw.randrange(low, high) for low, high in pairwise(edges)]

    def budget(self, k: int) -> int:
        """Return the bytes of a generation with the dense part and `k` experts per layer: what a partial one of that K has."""
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
"""Shows that everything runs, and says nothing about quality."""


@dataclass(frozen=True, kw_only=True)
class QualityFit:
    """A run that is killed and resumed."""

    case: Case
    scale: Scale
    seed: int
    memory: str
    """Folder on a tmpfs that is the shared memory of the node."""
    record: str
    """File to which every attempt appends."""
    accelerator: Accelerator

    def __call__(self, attempt: Attempt) -> Record:
        """Run an attempt. Returns nothing: its lines are in the record, beside those of attempts that were killed."""
        own_memory(self.memory, lost=attempt.index > 0 and self.case.loss == "node")
        defaults = {**(GradientCompression.__init__.__kwdefaults__ or {}), "small_numel": _SMALL_NUMEL}
        where = "GradientCompression.__init__.__kwdefaults__"
        Seam(module=GradientCompression.__module__, attribute=where, replacement=defaults).apply()
        # Another seed in every attempt but the first: what is not restored shows.
        seed_everything(self.seed + 7919 * attempt.index, verbose=False)
        model = TextModel(self.scale.size, self.scale.steps)
        if self.case.system == "control":
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 1 + _NUDGE)
        checkpoint = self._checkpoint(attempt.url)
        boost = CapacityBoost() if self.case.boosted else None
        record = QualityRecord(self, checkpoint, boost, resumed=attempt.index > 0)
        own: list[Callback] = [callback for callback in (checkpoint, boost, record) if callback is not None]
        with quiet_lightning():
            callbacks = attempt.callbacks(*own)
            trainer = bench_trainer(accelerator=self.accelerator, callbacks=callbacks, max_steps=self.scale.steps)
            # One batch more than it takes, so that no epoch ends.
            trainer.fit(model, training_text(self.scale.size, self.scale.steps + 1, self.seed))
        return {}

    def _checkpoint(self, url: str) -> QualityCheckpoint | None:
        case, scale, system = self.case, self.scale, self.case.system
        # `QualityRecord` looks once per process, which a restart must not put back.
        shared: CheckpointArguments = {
            "keep": scale.keep,
            "overhead_target": None,
            "untouched": ["callback.QualityRecord.*"],
        }
        if system == "sparse":
            return SparseCheckpoint(url, window=_WINDOW, **shared)
        if system in _MODES:
            feeds_back = system == "feedback"
            return DifferentialCheckpoint(
                url, every_n_steps=_BASE_EVERY, mode=_MODES[system], error_feedback=feeds_back, keep=scale.keep
            )
        if system == "selective":
            local, remote = scale.budget(case.snapshot_k), scale.budget(case.k)
            return SelectiveExpertCheckpoint(
                url, every_n_steps=case.every, local_budget=local, remote_budget=remote, **shared
            )
        if case.is_partial:
            every = scale.ablation_every if system == "ablation" else case.every
            limit = _PLT_BUDGET if system == "dynamic" else None
            return PartialExpertCheckpoint(
                url,
                every_n_steps=every,
                k=case.k,
                snapshot_k=case.snapshot_k,
                select=case.select,
                plt_budget=limit,
                **shared,
            )
        return None


class QualityRecord(Callback):
    """Append a line for every step and every validation.

    It also waits, before each optimizer step, until the generation before it is durable: what a fault costs must depend
    on the policy, not on how busy the disk is.

    Args:
        fit: what is run.
        checkpoint: the callback whose figures are taken, if there is one.
        boost: the callback whose debts are taken, if there is one.
        resumed: whether an attempt came before this one.
    """

    def __init__(
        self, fit: QualityFit, checkpoint: QualityCheckpoint | None, boost: CapacityBoost | None, *, resumed: bool
    ) -> None:
        self._scale, self._is_partial, self._has_tasks = fit.scale, fit.case.is_partial, fit.case.with_tasks
        exact = fit.case.loss == "nothing" or fit.case.system in EXACT
        self._checkpoint, self._boost = checkpoint, boost
        # A replayed step has weights that are not all there yet, and was validated by the attempt that took it.
        self._done = {line["step"] for line in lines_of(fit.record, "validation")} if exact else set()
        self._lines = JsonLines(fit.record)
        self._crops_NT = validation_text(fit.scale.size, fit.scale.val_crops)
        self._look_at_once = resumed and not exact
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
        self._lines.write({"what": "step", "step": step, "boosted": sum(map(bool, debts)), "debt": sum(debts)})
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
        line = {"what": "end", "tokens": tokens, "drops": drops, **_figures(self._checkpoint)}
        self._lines.write({**line, "tasks": pl_module.accuracies(self._crops_NT)} if self._has_tasks else line)

    def _validate(self, what: str, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, TextModel)
        lost = self._checkpoint.report.lost if self._checkpoint is not None else None
        line = {"what": what, "step": trainer.global_step, "bits": module.bits_per_byte(self._crops_NT)}
        self._lines.write(line if lost is None else {**line, "plt": lost.plt, "k": lost.k})


def _figures(checkpoint: QualityCheckpoint | None) -> Record:
    """Return figures of the attempt that ends; the accounting is that of the whole run."""
    if checkpoint is None:
        return {}
    report, lost = checkpoint.report, checkpoint.report.lost
    whole = max(1, report.steps) * report.dense_nbytes
    found = {"captured": report.nbytes_captured / whole, "persisted": report.nbytes_persisted / whole}
    if lost is None:
        return found
    counted = ("plt", "mlt", "k", "lost", "processed")
    return {**found, **{name: getattr(lost, name) for name in counted}, "lossy_faults": lost.faults}


# -- model and text


def _letters(bytes_BT: Tensor) -> Tensor:
    return (bytes_BT >= ord("a")) & (bytes_BT <= ord("z"))


def _asked(before_BT: Tensor, target_BT: Tensor) -> dict[str, Tensor]:
    """Return by task which bytes of a text are asked for; `before_BT` has the byte before each."""
    marks = torch.tensor([*b"()[]{}:,.="], device=target_BT.device)
    return {
        "every byte": torch.ones_like(target_BT, dtype=torch.bool),
        "inside words": _letters(before_BT) & _letters(target_BT),
        "first of a line": before_BT == ord("\n"),
        "punctuation": torch.isin(target_BT, marks),
    }


class TextModel(BenchModel):
    """`BenchModel` with the text example's schedule and a validation loss.

    Args:
        size: what is built.
        total_steps: after which the cosine has come down to a tenth of the peak.
    """

    def __init__(self, size: ModelSize, total_steps: int) -> None:
        super().__init__(size)
        self.total_steps = total_steps

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW under a warm-up with a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = LambdaLR(optimizer, self._relative_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _relative_rate(self, step: int) -> float:
        if step < _WARM_UP:
            return (step + 1) / _WARM_UP
        progress = (step - _WARM_UP) / max(1, self.total_steps - _WARM_UP)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    def bits_per_byte(self, crops_NT: Tensor) -> float:
        """Return the validation loss. Nothing is dropped in it: a capacity that is raised at the time must not flatter it."""
        with self._evaluating(), torch.no_grad():
            losses = [
                float(self.cross_entropy(crops_BT)) * len(crops_BT)
                for crops_BT in torch.split(crops_NT.to(self.device), _VALIDATION_BATCH)
            ]
        return sum(losses) / len(crops_NT) / math.log(2)

    def accuracies(self, crops_NT: Tensor) -> dict[str, float]:
        """Return the percent of bytes that are predicted, by task: all bytes, those inside words, first of a line, punctuation."""
        right, asked = Counter[str](), Counter[str]()
        with self._evaluating(), torch.no_grad():
            for crops_BT in torch.split(crops_NT.to(self.device), _VALIDATION_BATCH):
                before_BT, target_BT = crops_BT[:, :-1], crops_BT[:, 1:]
                x_BTD = self.embed(before_BT) + self.position.weight[: before_BT.shape[1]]
                right_BT = self.head(self.blocks(x_BTD)).argmax(-1) == target_BT
                for task, asked_BT in _asked(before_BT, target_BT).items():
                    right[task] += int((right_BT & asked_BT).sum())
                    asked[task] += int(asked_BT.sum())
        return {task: 100 * right[task] / number for task, number in asked.items()}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        layers = self.moe_layers()
        before = [(layer, layer.capacity_factor, layer.l_aux) for layer in layers]
        self.eval()
        for layer in layers:
            layer.capacity_factor = 0.0
        try:
            yield
        finally:
            for layer, factor, l_aux in before:
                layer.capacity_factor, layer.l_aux = factor, l_aux
            self.train()


def training_text(size: ModelSize, num_batches: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of crops, each a byte longer than the context that is predicted, in the order of the seed."""
    crops_NT = _crops(_library_text(validation=False), num_batches * size.batch_size, size, seed)
    return DataLoader(TensorDataset(crops_NT), batch_size=size.batch_size)


def validation_text(size: ModelSize, num_crops: int) -> Tensor:
    """Return crops that are the same in every run: int64 `[num_crops, context + 1]`."""
    return _crops(_library_text(validation=True), num_crops, size, _VALIDATION_SEED)


def _crops(text: Tensor, num_crops: int, size: ModelSize, seed: int) -> Tensor:
    start_N = torch.randint(len(text) - size.context - 1, (num_crops,), generator=torch.Generator().manual_seed(seed))
    return text[start_N[:, None] + torch.arange(size.context + 1)].long()


def _library_text(*, validation: bool) -> Tensor:
    """Return the bytes of all files of one kind, uint8."""
    root, found = Path(sysconfig.get_path("stdlib")), list[bytes]()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        text = path.read_bytes() if path.parent.name not in _LEFT_OUT else b""
        if text and (hashlib.sha256(text).digest()[0] * _VALIDATION_SHARE < 256) == validation:
            found.append(text)
    if not found:
        raise ConfigurationError(
            f"No library source under {root}. Run the benchmark with a Python that has its standard library as .py files."
        )
    return torch.frombuffer(bytearray(b"\n".join(found)), dtype=torch.uint8)
