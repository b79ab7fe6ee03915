"""A training that is killed and resumed on a device, held against the same training left in peace, bit by bit.

It trains in peace twice: where two such runs differ, kernels are not deterministic and nothing can be said of a resume.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import one_thread, quiet_lightning
from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize, random_tokens
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import Kill, Life, LifeResult, differences, run_lives
from lightning_moe_ckpt.tiers import shared_directory

Policy = Literal["sparse", "dense"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
_SIZE = ModelSize(num_blocks=2, model_dim=64, num_experts=4, expert_dim=64, batch_size=4, dropout=0.1)
_WINDOW = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """How a killed run ended."""

    policy: Policy
    accelerator: Accelerator
    resumed_from: int
    """Step."""
    restored_from: Mapping[str, int]
    """Bytes by tier."""
    num_tensors: int
    """Tensors of the state that are compared."""
    differs: list[str]
    """What has other bits than in the run left in peace, losses of all steps included."""
    unrepeatable: list[str]
    """What has other bits in a second run left in peace: kernels that are not deterministic."""
    seconds: float
    """Of both lives."""


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """What a life runs."""

    policy: Policy | None
    accelerator: Accelerator
    steps: int
    memory: str
    """Folder that takes the place of shared memory."""

    def __call__(self, life: Life) -> dict[str, Any]:
        if self.policy == "dense":
            shutil.rmtree(self.memory, ignore_errors=True)
        os.environ["MOE_CKPT_SHARED_MEMORY"] = self.memory
        Path(self.memory).mkdir(exist_ok=True)
        seed_everything(life.seed, verbose=False)
        if self.accelerator == "gpu":
            # Attention has no deterministic backward in the fused kernels for float32.
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
        checkpoint = self._checkpoint(life.url)
        with quiet_lightning():
            trainer = Trainer(
                accelerator=self.accelerator,
                devices=1,
                strategy=MoEStrategy(),
                deterministic="warn",
                callbacks=life.callbacks(*([] if checkpoint is None else [checkpoint])),
                max_steps=self.steps,
                gradient_clip_val=1.0,
                logger=False,
                enable_checkpointing=True,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            torch.manual_seed(0)
            model = BenchModel(_SIZE)
            torch.manual_seed(life.seed)  # what the resume has to put right
            trainer.fit(model, random_tokens(_SIZE, self.steps + 1))
        if checkpoint is None:
            return {}
        return {"resumed_from": checkpoint.report.resumed_from, "restored_from": checkpoint.report.restored_from}

    def _checkpoint(self, url: str) -> DenseCheckpoint | SparseCheckpoint | None:
        if self.policy is None:
            return None
        if self.policy == "dense":
            return DenseCheckpoint(url, every_n_steps=_WINDOW)
        return SparseCheckpoint(url, window=_WINDOW)


def kill_and_resume(accelerator: Accelerator, *, steps: int = 16, timeout: float = 40) -> Iterator[Resumed]:
    """Run it all, in processes forked from this one, which must not have used CUDA.

    Args:
        accelerator: of the Trainer, `cpu` or `gpu`.
        steps: of the training; it is killed in the second half.
        timeout: seconds for each life.

    Returns:
        A sparse run, which finds the memory of the one before it, and a dense one, which has to read storage.

    Raises:
        LifeFailed: a life ended otherwise than it should; the message holds its log.
    """
    with (
        one_thread(),  # comparing on several would leave threads that the next life's fork has not, and waits for
        tempfile.TemporaryDirectory(prefix="moe-ckpt-resume-", dir=shared_directory()) as memory,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-resume-") as folder,
    ):

        def run(name: str, policy: Policy | None, *kills: Kill) -> list[LifeResult]:
            fit = _Fit(policy=policy, accelerator=accelerator, steps=steps, memory=f"{memory}/{name}")
            workdir = Path(folder) / f"{name}-lives"
            return run_lives(fit, url=f"{folder}/{name}", workdir=workdir, kills=kills, timeout=timeout)

        (peace,), (again,) = run("peace", None), run("again", None)
        for policy in POLICIES:
            killed, last = run(policy, policy, Kill(phase="forward", step=steps * 5 // 8, settle=20.0))
            returned, end = last.returned(), last.end()
            yield Resumed(
                policy=policy,
                accelerator=accelerator,
                resumed_from=returned["resumed_from"],
                restored_from=returned["restored_from"],
                num_tensors=sum(isinstance(value, torch.Tensor) for value in end.values()),
                differs=[*differences(peace.end(), end), *_other_losses(peace, killed), *_other_losses(peace, last)],
                unrepeatable=[*differences(peace.end(), again.end()), *_other_losses(peace, again)],
                seconds=killed.seconds + last.seconds,
            )


def _other_losses(peace: LifeResult, other: LifeResult) -> list[str]:
    wanted = {line["step"]: line["loss"] for line in peace.records(kind="train")}
    found = {line["step"]: line["loss"] for line in other.records(kind="train")}
    return [f"loss of step {step}: {found[step]}, not {wanted[step]}" for step in found if found[step] != wanted[step]]
