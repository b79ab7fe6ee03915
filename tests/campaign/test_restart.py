"""An audit names a rank: another process takes its place, and all go on from before the fault, with the bits of a run without it.

The fault is real, a flipped bit in one rank's weights; that it is found, and when, a callback says.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from door import CheckpointCallback, JsonLines, checkpoint_of, read_lines
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import Self, override

from campaign._campaign import Campaigns
from campaign._in_place import Abort, Death, no_place, train_and_die
from campaign._nodes import Nodes
from campaign._pipelined import Pipelined
from campaign._training import Checkpointing, Setup, train
from campaign.test_in_place import run_killed
from lightning_moe_ckpt.errors import SilentFault
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill, differences


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A bit that flips, and the audit that finds it."""

    rank: int
    flips_at: int
    found_at: int | None
    """None where real audits are to find it."""
    named: tuple[int, ...]
    """Ranks that the audit names."""
    sticks: int = 0
    """Processes of the rank that compute wrong from then on, in the place of a bit that flips."""
    resumed: int
    """Most steps of the generation that is gone on from."""


class Audits(Callback):
    """Every step is audited; each is clean but for those that find a fault. Each fault comes once."""

    def __init__(self, faults: Sequence[Fault], life: Attempt) -> None:
        self._faults, self._life, self._sticks = faults, life, False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        callback, step = checkpoint_of(trainer), trainer.global_step
        if callback is None or callback.replaying:
            return
        assert callback._run is not None
        if self._faults and self._faults[0].sticks:
            self._stick(self._faults[0], pl_module, step)
            return
        seen = self._life.workdir / f"found.{self._life.rank}"
        count = len(seen.read_text()) if seen.exists() else 0
        fault = self._faults[count] if count < len(self._faults) else None
        if fault is not None and step >= fault.flips_at:
            if step == fault.flips_at and fault.rank == self._life.rank:
                next(pl_module.parameters()).data.view(torch.int32).view(-1)[0] ^= 1 << 20
            if fault.found_at is None:
                seen.write_text("x" * (count + 1))
            elif step >= fault.found_at:
                seen.write_text("x" * (count + 1))
                callback._run.sessions.condemn(
                    fault.named, f"rank {fault.rank} computes other values in step {step}", ends=False
                )
        elif all(each.found_at is not None for each in self._faults):
            callback._run.session.passed_audit(step)

    def _stick(self, fault: Fault, module: LightningModule, step: int) -> None:
        is_faulty = self._life.rank == fault.rank and self._life.index < fault.sticks
        if is_faulty and not self._sticks and (self._life.index or step >= fault.flips_at):
            self._sticks = True
            layer = next(each for each in module.modules() if isinstance(each, torch.nn.Embedding))
            layer.register_forward_hook(lambda *said: said[-1] * (1 + 2**-12))


@dataclass(frozen=True, kw_only=True)
class Audited(Setup):
    """A training with faults."""

    faults: tuple[Fault, ...] = field(default=())

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [*super().callbacks(life), Audits(self.faults, life)]

    @override
    def fault_free(self) -> Self:
        return replace(super().fault_free(), faults=())


@dataclass(frozen=True, kw_only=True)
class AuditedStages(Audited, Pipelined):
    """The same in stages."""


def train_with_audits(setup: Audited, life: Attempt) -> Mapping[str, Any]:
    """Sessions are told that there are audits; in a process without supervisor a finding ends it, as a kill does for the campaign."""
    config = CheckpointCallback._config
    if any(fault.found_at is not None for fault in setup.faults):
        CheckpointCallback._config = lambda self: replace(config(self), audit_every_n_steps=1)  # type: ignore[method-assign]
    try:
        return train(setup, life)
    except SilentFault as error:
        JsonLines(life.records).write({"kind": "killed", "why": str(error)})
        raise


FAULT = Fault(rank=1, flips_at=4, found_at=7, named=(1,), resumed=3)
DENSE_3 = Audited(world_size=3, checkpointing=Checkpointing(policy="dense"), faults=(FAULT,))
SPARSE_4 = Audited(
    model="stacked",
    options=(("num_experts", 12),),
    world_size=4,
    expert_parallel=2,
    checkpointing=Checkpointing(policy="sparse", window=2),
    faults=(FAULT, Fault(rank=0, flips_at=7, found_at=8, named=(0, 2), resumed=6)),
)
REAL = (("audit_every_n_steps", 2), ("on_fault", "restart"))
FLIPPED = replace(FAULT, found_at=None)
AUDITED = replace(DENSE_3, checkpointing=Checkpointing(policy="dense", arguments=REAL), faults=(FLIPPED,))
AUDITED_4 = replace(SPARSE_4, checkpointing=Checkpointing(policy="sparse", window=2, arguments=REAL), faults=(FLIPPED,))
NOBODY = replace(DENSE_3, faults=(replace(FAULT, named=()),))
EVERYBODY = replace(DENSE_3, faults=(replace(FAULT, named=(0, 1, 2)),))
AUDITED_STAGES = AuditedStages(
    world_size=4,
    stages=2,
    validate_every=None,
    checkpointing=Checkpointing(policy="sparse", window=2, arguments=REAL),
    faults=(replace(FLIPPED, named=(0, 1)),),  # a stage has two replicas, so either may be wrong
)
STAGES = AuditedStages(
    world_size=4, stages=2, validate_every=None, checkpointing=Checkpointing(policy="sparse", window=2), faults=(FAULT,)
)
DIFFERENCES = replace(DENSE_3, checkpointing=Checkpointing(policy="differential", batch=2))


@pytest.mark.parametrize(
    "setup",
    [
        SPARSE_4,
        STAGES,
        AUDITED,
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in (AUDITED_4, AUDITED_STAGES, DENSE_3, NOBODY, EVERYBODY, DIFFERENCES)
        ),
    ],
    ids=[
        *("experts", "stages", "audited", "audited-experts", "audited-stages"),
        *("dense", "nobody", "everybody", "differences"),
    ],
)
def test_the_named_ranks_are_replaced_and_all_go_back_before_the_fault(campaigns: Campaigns, setup: Audited) -> None:
    """The others stay in their processes; generations of after the fault are in memory and in storage, and nobody takes them."""
    deaths = sum(len(fault.named) for fault in setup.faults)
    lives = run_killed(campaigns, setup, fit=partial(train_with_audits, setup), deaths=deaths, same_seed=True)
    require_same_end(campaigns, setup, lives)
    stays = next(
        (rank for rank in range(setup.world_size) if all(rank not in each.named for each in setup.faults)), None
    )
    if stays is not None:
        require_gone_back(lives[0].log(stays), setup.faults)


def require_same_end(campaigns: Campaigns, setup: Audited, lives: Sequence[AttemptResult]) -> None:
    """What was trained with the fault has left nothing behind."""
    (reference,) = campaigns.reference(setup)
    for rank in range(setup.world_size):
        assert not differences(reference.end(rank), lives[-1].end(rank)), rank


def require_gone_back(log: str, faults: Sequence[Fault]) -> None:
    resumed = [int(step) for step in re.findall(r"resumes from step (\d+) ", log)]
    assert len(resumed) == len(faults), log
    assert all(step <= fault.resumed for step, fault in zip(resumed, faults, strict=True)), log


@pytest.mark.soak
def test_a_process_on_the_same_device_is_found_at_its_first_audit(campaigns: Campaigns) -> None:
    """That ranks differ from the first audit on is no finding in a new run; here they had agreed before."""
    setup = replace(AUDITED, faults=(replace(FLIPPED, sticks=2),))
    lives = run_killed(campaigns, setup, fit=partial(train_with_audits, setup), deaths=2, same_seed=True)
    require_same_end(campaigns, setup, lives)
    require_gone_back(lives[0].log(0), setup.faults * 2)


@pytest.mark.soak
@pytest.mark.parametrize("resume", ["auto", "memory"])
def test_copies_on_other_nodes_are_void_too(campaigns: Campaigns, folder: Path, resume: str) -> None:
    """Memory is what a restart takes from first, and with `resume="memory"` whatever the log says, but for this."""
    nodes, arguments = Nodes(folder, (0, 1, 2)), (("resume", resume), ("replicas", 1))
    setup = replace(DENSE_3, checkpointing=Checkpointing(policy="dense", arguments=arguments))
    fit = partial(train_on_nodes, setup, nodes)
    lives = run_killed(campaigns, setup, fit=fit, deaths=1, same_seed=True)
    require_same_end(campaigns, setup, lives)
    require_gone_back(lives[0].log(0), setup.faults)
    assert nodes.files() == []


@pytest.mark.soak
@pytest.mark.parametrize("after", [False, True], ids=["before", "behind"])
def test_another_rank_dies_as_generations_become_void(campaigns: Campaigns, after: bool) -> None:
    """They are void all the same: the coordinator writes first. The rank that is named gives way if it has come to know."""
    deaths = [Death(rank=2, at=Abort(place="condemn", after=after))]
    fit = partial(train_and_die, AUDITED, deaths, no_place)
    lives = run_killed(campaigns, AUDITED, fit=fit, deaths=2, must_strike=after, same_seed=True)
    require_same_end(campaigns, AUDITED, lives)
    assert all(int(step) <= 3 for step in re.findall(r"resumes from step (\d+) ", lives[0].log(0)))


def train_on_nodes(setup: Audited, nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    nodes.settle(life)
    return train_with_audits(setup, life)


def test_without_a_supervisor_the_next_start_goes_back_before_the_fault(campaigns: Campaigns) -> None:
    """All processes end, with the ranks that are named."""
    never = Kill(phase="forward", step=99, rank=1, signal=signal.SIGUSR2)
    fit = partial(train_with_audits, DENSE_3)
    first, second = lives = campaigns.run(DENSE_3, never, fit=fit)
    require_same_end(campaigns, DENSE_3, lives)
    assert set(first.exit_codes.values()) == {1}
    for rank in range(3):
        why = read_lines(first.workdir / f"attempt0.rank{rank}.jsonl")[-1]["why"]
        assert (
            "rank 1 computes other values in step 7. Generations behind step 3, the last clean audit, are void" in why
        )
    assert "void: an audit has found a fault" in second.log()
    require_gone_back(second.log(), DENSE_3.faults)
