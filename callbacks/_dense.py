"""The baseline: everything, every so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_moe_ckpt.callbacks._arguments import require_count
from lightning_moe_ckpt.callbacks._base import STOP_GRACE, CheckpointCallback
from lightning_moe_ckpt.callbacks._batches import Batches
from lightning_moe_ckpt.session import DenseWindows, WindowPolicy
from lightning_moe_ckpt.storage import Resume, Retention
from lightning_moe_ckpt.tiers import DEFAULT_MAX_CHUNK, FailureDomain


class DenseCheckpoint(CheckpointCallback):
    """Takes the full state of all operators every `every_n_steps` steps and resumes from it, bit for bit.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: optimizer steps between two snapshots.
        keep: short for `retention=Retention(last=keep)`; 2 if neither is given.
        retention: which committed generations stay, by number, step and age; the others are deleted once newer ones
            are durable.
        resume: `auto` continues a run found at `url` and starts one otherwise, `must` refuses to start a new one,
            `never` starts anew beside what is there.
        storage_options: of the store, in the words of s3fs, gcsfs, adlfs or another fsspec file system; a path takes none.
        bandwidth: bytes per second that each rank may write to storage, so that checkpoints leave the network to
            training; `None` for no cap. What does not fit skips generations.
        replicas: copies of every rank's generations in memory of other nodes, kept at the pace of training; `auto` is one
            where the ranks are on several nodes, else none.
        max_chunk: bytes of one message of such a copy, which is what training's own messages may have to wait for.
        failure_domains: node and rack of every rank, by rank; `None` for what each finds out, or what `MOE_CKPT_NODE`
            and `MOE_CKPT_RACK` say.
        batches: `reposition` lets the loaders fetch again what a resumed run has to train on again. `log` is for data
            that cannot be read twice: the batches of a window are stored with it, and a restart is exact up to the step
            at which the state is dense, not beyond.
        stop_grace: how long SIGTERM may take from the signal to the end of the process. Within it all ranks agree on
            a boundary and store it; what cannot be stored by then is left. Keep it below the patience of your
            launcher: torchrun and SLURM kill after 30 s.
        freeze_heap: keep what is alive after the first generation out of garbage collections until the fit ends
            (`gc.freeze`), which else hold up training for a quarter of a second now and then. It is for the whole
            process; not done where collections are off or frozen already.

    Raises:
        ConfigurationError: an argument is out of range.

    Source: CheckFreq (2021) and Gemini (2023), the baselines of MoEvement (2024), Sec. 5.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        every_n_steps: int = 100,
        keep: int | None = None,
        retention: Retention | None = None,
        resume: Resume = "auto",
        storage_options: dict[str, Any] | None = None,
        bandwidth: int | None = None,
        replicas: int | Literal["auto"] = "auto",
        max_chunk: int = DEFAULT_MAX_CHUNK,
        failure_domains: Sequence[FailureDomain] | None = None,
        batches: Batches = "reposition",
        stop_grace: timedelta = STOP_GRACE,
        freeze_heap: bool = True,
    ) -> None:
        super().__init__(
            url,
            keep=keep,
            retention=retention,
            resume=resume,
            storage_options=storage_options,
            bandwidth=bandwidth,
            replicas=replicas,
            max_chunk=max_chunk,
            failure_domains=failure_domains,
            batches=batches,
            stop_grace=stop_grace,
            freeze_heap=freeze_heap,
        )
        require_count(self, "every_n_steps", every_n_steps, what="steps")
        self.every_n_steps = every_n_steps

    @override
    def _policy(self) -> WindowPolicy:
        return DenseWindows(every_n_steps=self.every_n_steps)
