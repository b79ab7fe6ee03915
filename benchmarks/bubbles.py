"""Measure what training feels of copies that wait for a pipeline's bubbles, and what the trial says of them.

    cores     two stages, each with one core for its operations and its copies: copies beside operations take their time
    devices   four stages that sleep in operations, as beside a device: copies disturb nothing

A stage has state that no operation touches, as experts without tokens, and captures all of it at every step. Storage holds still.
The trial's steps take turns in one training: copies that wait for bubbles, and copies that do not. `none` is another training.

Source: MOETION (2024), Sec. 5.3 and Fig. 10 (-13 % to -30 % of checkpoint time).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.steps import train_in_ranks
from lightning_moe_ckpt.benchmarks._benchmark import Progress, table_of
from lightning_moe_ckpt.benchmarks._fits import (
    StorageGate,
    bench_folders,
    bench_trainer,
    own_memory,
    patient_storage,
    quiet_lightning,
)
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.native import measure_bandwidth
from lightning_moe_ckpt.storage import wrapping_backends
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing._records import JsonLines, read_lines

# Shape suffixes: B samples of a micro-batch, D width.

SETTINGS = {"cores": 2, "devices": 4}
"""Stages of each setting."""
_DIM, _WARM_UP, _LIMIT_SECONDS = 512, 8, 110.0
_FORWARD_SECONDS = 0.003
"""Sleep of a stage in one forward; a backward is twice as long."""
_COLUMNS = ("setting", "stage", "copies", "bubbles", "none", "beside", "waiting", "then", "verdict")
_NOTE = """\
milliseconds, medians over steps: copies of one step alone, bubbles of one step, a step without checkpoints, steps of the trial \
in which copies ran beside operations, and in which they waited for bubbles, and steps after the trial"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BubbleFigure:
    """A stage of one setting; seconds."""

    setting: str
    stage: int
    copy_seconds: float
    """The copies of one step alone: the median of all stages."""
    bubble_seconds: float
    none_seconds: float
    """A step without checkpoints."""
    beside_seconds: float | None
    """A step of the trial whose copies waited for nothing; `None` where the trial had no turns."""
    waiting_seconds: float | None
    """A step of the trial whose copies waited for bubbles."""
    then_seconds: float
    """A step after the trial."""
    chunks: dict[str, int]
    verdict: str


def measure(options: SimpleNamespace, progress: Progress) -> list[BubbleFigure]:
    """Run the benchmark."""
    found = []
    for done, setting in enumerate(options.bubble_settings):
        progress(f"{SETTINGS[setting]} stages, {setting}", done, len(options.bubble_settings))
        plain = _trained(setting, options, checkpoints=False)
        with_copies = _trained(setting, options, checkpoints=True)
        none = statistics.median(seconds for rank in plain for seconds in rank["steps"])
        copies = statistics.median(rank["copy"] for rank in with_copies)  # a machine at work disturbs single ones
        for stage, rank in enumerate(with_copies):
            beside, waiting = (statistics.median(each) if each else None for each in rank["trial"])
            found.append(
                BubbleFigure(
                    setting=setting,
                    stage=stage,
                    copy_seconds=copies,
                    bubble_seconds=rank["bubbles"],
                    none_seconds=none,
                    beside_seconds=beside,
                    waiting_seconds=waiting,
                    then_seconds=statistics.median(rank["steps"]),
                    chunks=rank["chunks"],
                    verdict=rank["verdict"],
                )
            )
    return found


def table(figures: Sequence[BubbleFigure]) -> Table:
    """Return the figures for people."""
    rows = [
        [
            figure.setting,
            str(figure.stage),
            *map(
                _ms,
                (
                    figure.copy_seconds,
                    figure.bubble_seconds,
                    figure.none_seconds,
                    figure.beside_seconds,
                    figure.waiting_seconds,
                    figure.then_seconds,
                ),
            ),
            figure.verdict,
        ]
        for figure in figures
    ]
    return table_of("Copies of every step in a pipeline's stages, and bubbles", _COLUMNS, rows, _NOTE)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _trained(setting: str, options: SimpleNamespace, *, checkpoints: bool) -> list[dict[str, Any]]:
    """Train in all stages, and return their figures."""
    what = {
        "setting": setting,
        "stages": SETTINGS[setting],
        "megabytes": options.bubble_megabytes if checkpoints else 0,
        "state": options.bubble_megabytes,
        "layers": options.bubble_layers if setting == "cores" else 1,
        "samples": options.bubble_samples if setting == "cores" else 2,
        "steps": options.bubble_steps,
    }
    with bench_folders() as (folder, memory):
        arguments = [str(folder), str(memory), json.dumps(what)]
        train_in_ranks(__name__, arguments, ranks=SETTINGS[setting], seconds=_LIMIT_SECONDS)
        return [line for rank in range(SETTINGS[setting]) for line in read_lines(folder / f"rank{rank}")]


# -- one rank


class _Unused(nn.Module):
    """State that gets no gradient."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(2**18)) for _ in range(megabytes))


class _Stage(nn.Module):
    """Layers that compute, or sleep as long, beside state that they do not touch."""

    def __init__(self, stage: int, what: dict[str, Any]) -> None:
        super().__init__()
        layers = nn.Sequential(*(nn.Linear(_DIM, _DIM) for _ in range(what["layers"])))
        # Operators have names of the whole model: those of two stages must differ.
        self.layers, self.unused = (
            nn.ModuleDict({f"{stage}": layers}),
            nn.ModuleDict({f"{stage}": _Unused(what["state"])}),
        )
        self._sleeps = what["setting"] == "devices"

    @override
    def forward(self, x_BD: Tensor) -> Tensor:
        (layers,) = self.layers.values()
        x_BD = torch.tanh(layers(x_BD))
        if self._sleeps:
            time.sleep(_FORWARD_SECONDS)
        if self._sleeps and x_BD.requires_grad:
            x_BD.register_hook(_sleep_twice)  # type: ignore[no-untyped-call]
        return x_BD


def _sleep_twice(grad: Tensor) -> Tensor:
    time.sleep(2 * _FORWARD_SECONDS)
    return grad


class _Model(LightningModule):
    """Stages of equal length."""

    def __init__(self, what: dict[str, Any]) -> None:
        super().__init__()
        self.what = what

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Return one stage."""
        del num_stages
        torch.manual_seed(stage)
        return _Stage(stage, self.what)

    def stage_loss(self, output_BD: Tensor, target_BD: Tensor) -> Tensor:
        """Return the squared error."""
        return (output_BD - target_BD).pow(2).mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer without state."""
        return torch.optim.SGD(self.parameters(), 1e-3)


class _Steps(Callback):
    """Notes when steps begin, and writes the figures of one rank after the last."""

    def __init__(self, folder: Path, checkpoint: DenseCheckpoint | None, gate: StorageGate) -> None:
        self._folder, self._checkpoint, self._gate = folder, checkpoint, gate
        self._begun: list[float] = []
        self._judged = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._gate.close()
        self._begun.append(time.perf_counter())
        if self._checkpoint is not None and not self._judged:
            figures = self._checkpoint.report.bubbles
            self._judged = 0 if figures is None or figures.verdict.startswith("no trial") else len(self._begun)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step < trainer.max_steps:
            return
        steps = [b - a for a, b in zip(self._begun, self._begun[1:], strict=False)]
        found: dict[str, Any] = {"steps": steps[max(self._judged, _WARM_UP) :] or steps[-_WARM_UP:]}
        if self._checkpoint is not None:
            figures, report = self._checkpoint.report.bubbles, self._checkpoint.report
            assert figures is not None
            found |= {
                "trial": [figures.steps[False], figures.steps[True]],
                "verdict": figures.verdict,
                "chunks": figures.chunks,
                "bubbles": figures.seconds,
                "copy": report.nbytes_captured / report.steps / measure_bandwidth(2**26),
            }
        self._gate.open()
        JsonLines(self._folder / f"rank{trainer.global_rank}").write(found)


def main() -> None:
    """Train one rank."""
    folder, memory, text = sys.argv[1:]
    what = json.loads(text)
    torch.set_num_threads(1)
    if what["setting"] == "cores":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    own_memory(memory, lost=False)
    gate = StorageGate()
    checkpoint = DenseCheckpoint((Path(folder) / "run").as_uri(), every_n_steps=1, overhead_target=None)
    callbacks: list[Callback] = [checkpoint] if what["megabytes"] else []
    callbacks.append(_Steps(Path(folder), checkpoint if what["megabytes"] else None, gate))
    micro_batches = what["stages"]
    strategy = MoEStrategy(pipeline_parallel=what["stages"], micro_batches=micro_batches)
    batch = what["samples"] * micro_batches
    samples = torch.randn(what["steps"] * batch, _DIM, generator=torch.Generator().manual_seed(0))
    with quiet_lightning(), patient_storage(), wrapping_backends(gate.backend):
        trainer = bench_trainer(
            accelerator="cpu",
            devices=what["stages"],
            strategy=strategy,
            callbacks=callbacks,
            max_steps=what["steps"],
            gradient_clip_val=None,
            enable_checkpointing=bool(what["megabytes"]),
        )
        trainer.fit(_Model(what), DataLoader(TensorDataset(samples, samples.flip(1)), batch_size=batch))


if __name__ == "__main__":
    main()
