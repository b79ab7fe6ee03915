"""Trainings that store what each step has seen and made, and the same trainings as `moe-ckpt replay` starts them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from campaign._training import Setup, train
from lightning_moe_ckpt.callbacks._base import checkpoint_of
from lightning_moe_ckpt.errors import NoUsableGeneration
from lightning_moe_ckpt.fit._rerun import PARTS, StepDump
from lightning_moe_ckpt.launch import RERUN, RerunRequest
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.storage._open import memory_tag
from lightning_moe_ckpt.testing import Attempt

_at: dict[str, Any] = {"step": -1}
"""The dump under way; not an attribute, which would be part of the run's state."""


class Dumps(Callback):
    """Stores every step of a run that goes on, in the folder `out`, and lets storage keep up."""

    def __init__(self, out: Path | None) -> None:
        self.out = str(out) if out else ""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.out and trainer.global_step != _at["step"]:
            _at["dump"], _at["step"] = StepDump(PARTS, Path(self.out), trainer.global_rank), trainer.global_step
        if self.out:
            _at["dump"].batch_begins(pl_module, batch)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self.out:
            _at["dump"].before_optimizer_step(pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if self.out and trainer.global_step != _at["step"]:
            _at["dump"].ends(_at["step"])
            found = checkpoint_of(trainer)
            assert found is not None
            assert found.wait_committed()


def train_dumped(setup: Setup, out: Path | None, life: Attempt) -> Mapping[str, Any]:
    """Train with `Dumps` as a callback more."""
    kind: Any = type(setup)

    class Dumped(kind):  # type: ignore[misc]
        """The same setup."""

        @override
        def callbacks(self, life: Attempt) -> Any:
            return [Dumps(out), *super().callbacks(life)]

    return train(Dumped(**vars(setup)), life)


@dataclass(frozen=True)
class Again:
    """Some steps of it, in a process that has what `moe-ckpt replay` puts into the environment."""

    setup: Setup
    results: Path
    step: int
    until: int
    seconds: float = 0.0
    """How long it waits for a generation at or before the step."""

    def __call__(self, life: Attempt) -> Mapping[str, Any]:
        view = self._reached(life.url)
        assert view.history is not None
        request = RerunRequest(
            tag=memory_tag(view.history.key, view.url),
            name=f"{self.step:032x}",
            results=str(self.results / "results.json"),
            step=self.step,
            until=self.until,
            dump=PARTS,
            out=str(self.results),
        )
        os.environ |= request.to_environment()
        try:
            train_dumped(self.setup, None, life)
        except SystemExit as end:
            return {"status": end.code}
        finally:
            del os.environ[RERUN]
        return {"status": "ended"}

    def _reached(self, url: str) -> RunView:
        give_up = time.monotonic() + self.seconds
        while True:
            with suppress(NoUsableGeneration), closing(open_backend(url)) as backend:  # the run has not begun yet
                view = RunView.open(backend)
                found = [each.generation.step for each in view.generations() if each.usable]
                if any(step <= self.step and (step > 0 or not self.seconds) for step in found):
                    return view
            assert time.monotonic() <= give_up, "there is nothing to be run again"
            time.sleep(0.01)
