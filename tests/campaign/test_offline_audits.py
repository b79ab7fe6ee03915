"""`moe-ckpt audit`: steps that are run again have the run's bits, and one flipped bit in one step of the run is found."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from campaign._campaign import checkpoints, memory_of_run
from campaign._pipelined import Pipelined
from campaign._training import Setup, train
from campaign._warm import WarmParents
from campaign.test_replayed import LAYOUTS, POLICIES, listed
from lightning_moe_ckpt.errors import NoUsableGeneration
from lightning_moe_ckpt.inspection import _replays
from lightning_moe_ckpt.inspection._replays import audit_window
from lightning_moe_ckpt.launch import RERUN
from lightning_moe_ckpt.storage import open_backend
from lightning_moe_ckpt.testing import Attempt, AttemptResult, differences, run_attempts

FAULTY = 5
"""Step in which the run computes wrong."""
_fault: dict[str, Any] = {"step": -1, "again": False, "to_inf": False}
"""Not attributes of the callback, which would be part of the run's state."""


class Flips(Callback):
    """Flips a bit of one gradient in one step of the run; or others in each step that is run again, as broken hardware does.

    Of the largest element: one that is 0 becomes so small that no sum notices it.
    """

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _fault["to_inf"] and RERUN not in os.environ and trainer.global_step == _fault["step"]:
            _largest(pl_module).fill_(torch.inf)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        strikes = not _fault["to_inf"] and trainer.global_step == _fault["step"]
        if _fault["again"] if RERUN in os.environ else strikes:
            bit = time.time_ns() % 4096 if _fault["again"] else 1 << 22
            _largest(pl_module).view(torch.int32).bitwise_xor_(bit)


def _largest(module: LightningModule) -> torch.Tensor:
    """The largest element of the first gradient that there is; what is no number counts as the largest."""
    grad = next(param.grad for param in module.parameters() if param.grad is not None).view(-1)
    at = int(grad.abs().argmax())
    return grad[at : at + 1]


def train_faulty(setup: Setup, fault: Mapping[str, Any], environment: Mapping[str, str], life: Attempt) -> Any:
    """Train with `Flips`."""
    kind: Any = type(setup)

    class Faulty(kind):  # type: ignore[misc]
        """The same setup."""

        @override
        def callbacks(self, life: Attempt) -> Any:
            return [Flips(), *super().callbacks(life)]

    os.environ |= environment
    _fault.update(fault)
    try:
        return train(Faulty(**vars(setup)), life)
    except SystemExit as end:
        return {"status": end.code}


class Audited:
    """A run, and audits of it."""

    def __init__(
        self,
        warm: WarmParents,
        folder: Path,
        setup: Setup,
        *,
        step: int = -1,
        again: bool = False,
        to_inf: bool = False,
    ) -> None:
        self._warm, self._folder, self._setup = warm, folder, setup
        self._fault, self._turns = {"step": step, "again": again, "to_inf": to_inf}, itertools.count()
        self._place: dict[str, Any] = {"url": checkpoints(folder).as_uri(), "world_size": setup.world_size}
        self._life = self._train("run", {}, 0)

    def differs(self, other: Audited) -> bool:
        """Return whether the two runs ended with other weights or another state of the optimizer."""
        ranks = range(self._setup.world_size)
        return any(differences(self._life.end(rank), other._life.end(rank)) for rank in ranks)

    def audit(self, monkeypatch: pytest.MonkeyPatch, start: int | None) -> dict[str, Any]:
        """Return what an audit says, which changes nothing that is stored."""
        before, memory = listed(self._folder), memory_of_run(checkpoints(self._folder))
        monkeypatch.setattr(_replays, "_run", self._run)
        with closing(open_backend(self._place["url"])) as backend:
            answer = audit_window(backend, start, ["train.py"])
        assert (listed(self._folder), memory_of_run(checkpoints(self._folder))) == (before, memory)
        assert answer.tables()
        return {**answer.document, "status": answer.status, "turns": next(self._turns)}

    def _run(self, _: Sequence[str], environment: Mapping[str, str]) -> int:
        self._train(f"again{next(self._turns)}", {RERUN: environment[RERUN]}, 1)
        return 0

    def _train(self, name: str, environment: Mapping[str, str], first: int) -> AttemptResult:
        work = partial(train_faulty, self._setup, self._fault, environment)
        lives = self._warm.call(run_attempts, work, workdir=self._folder / name, first_index=first, **self._place)
        return lives[-1]


@pytest.mark.parametrize(
    "policy", ["sparse", *(pytest.param(policy, marks=pytest.mark.soak) for policy in ("dense", "differential"))]
)
def test_a_flipped_bit_is_found(
    warm: WarmParents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The window with the fault has other bits, twice the same; the window before it has the run's."""
    run = Audited(warm, tmp_path, Setup(checkpointing=POLICIES[policy]), step=FAULTY)
    found = run.audit(monkeypatch, FAULTY)
    assert found["first"] <= FAULTY < found["last"]
    assert (found["verdict"], found["status"], found["turns"]) == ("other bits", 1, 2)
    assert found["not_compared"] == []
    assert found["tensors"]
    assert [row["step"] for row in found["losses"] if row["step"] <= FAULTY] == []
    if found["first"] > 0:
        earlier = run.audit(monkeypatch, found["first"] - 1)
        assert (earlier["verdict"], earlier["status"], earlier["tensors"]) == ("the same bits", 0, [])
        assert earlier["operators_compared"] > 0


def test_steps_that_do_not_repeat_here_are_no_verdict(
    warm: WarmParents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bits in every process: the second time tells that the machine is no witness."""
    found = Audited(warm, tmp_path, Setup(checkpointing=POLICIES["dense"]), again=True).audit(monkeypatch, FAULTY)
    assert (found["verdict"], found["status"]) == ("no verdict", 2)
    assert "run twice here, the steps gave different bits" in found["notes"]


def test_a_window_that_is_not_kept_is_refused(
    warm: WarmParents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is kept."""
    setup = Setup(checkpointing=replace(POLICIES["dense"], keep=1))
    with pytest.raises(NoUsableGeneration, match=r"has no two generations.* It keeps 10 \(dense\)"):
        Audited(warm, tmp_path, setup).audit(monkeypatch, None)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_on_many_ranks(
    warm: WarmParents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, policy: str
) -> None:
    """Clean and with a fault, in every layout."""
    if isinstance(setup := LAYOUTS[layout], Pipelined) and policy == "differential":
        pytest.skip("`DifferentialCheckpoint` refuses stages")
    setup = replace(setup, checkpointing=POLICIES[policy])
    run = Audited(warm, tmp_path / "clean", setup)
    clean = run.audit(monkeypatch, FAULTY)
    assert (clean["verdict"], clean["not_compared"]) == ("the same bits", [])
    step = FAULTY - (FAULTY in setup.overflow_steps)  # a fault in a skipped step leaves nothing to find
    faulty = Audited(warm, tmp_path / "faulty", setup, step=step)
    assert faulty.differs(run)
    found = faulty.audit(monkeypatch, step)
    assert found["first"] <= step < found["last"]
    assert found["verdict"] == "other bits"
    assert found["tensors"]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_a_scaler_skips(
    warm: WarmParents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """One that is skipped for a fault alone is found; a fault in one that is skipped anyway has changed no bit."""
    setup = replace(LAYOUTS["fp16, overflows"], checkpointing=POLICIES[policy])
    clean = Audited(warm, tmp_path / "clean", setup)
    runs = {
        "skipped": Audited(warm, tmp_path / "skipped", setup, step=FAULTY - 1, to_inf=True),
        "skipped anyway": Audited(warm, tmp_path / "anyway", setup, step=FAULTY),
    }
    assert [each.differs(clean) for each in runs.values()] == [True, False]
    verdicts = [each.audit(monkeypatch, FAULTY - 1)["verdict"] for each in runs.values()]
    assert verdicts == ["other bits", "the same bits"]
