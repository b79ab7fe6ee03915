"""The harness itself: it sees what it must see, before any checkpoint is trusted to it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from door import Phase

from campaign._pairs import pairwise, product
from campaign._training import Setup
from campaign._warm import WarmParents
from lightning_moe_ckpt.testing import Attempt, AttemptFailed, AttemptResult, Kill, Seam, assert_same_end, run_attempts

THREE_RANKS = Setup(world_size=3, strategy="ddp")


def _lives(warm: WarmParents, workdir: Path, setup: Setup, *kills: Kill, **options: Any) -> list[AttemptResult]:
    return warm.call(
        run_attempts, setup.fit, url="", workdir=workdir, world_size=setup.world_size, kills=kills, **options
    )


@pytest.mark.parametrize("setup", [Setup(workers=2), Setup(loader="stateful", model="tied"), Setup(model="mixtral")])
def test_two_fault_free_lives_end_the_same(warm: WarmParents, tmp_path: Path, setup: Setup) -> None:
    """Training itself is deterministic, so that every later difference is the checkpoint's fault."""
    first, second = (_lives(warm, tmp_path / name, setup) for name in ("first", "second"))
    assert_same_end(first, second)


def test_a_life_that_starts_over_is_not_the_same_end(warm: WarmParents, tmp_path: Path) -> None:
    """Without a checkpoint the next life has another seed: weights, data, losses and RNG are all reported."""
    reference = _lives(warm, tmp_path / "reference", Setup())
    killed = _lives(warm, tmp_path / "killed", Setup(), Kill(phase="batch_start", step=3))
    assert killed[0].steps() == [1, 2, 3]
    with pytest.raises(AssertionError, match="differences from the fault-free run") as caught:
        assert_same_end(reference, killed)
    for word in ("param/model.embedding.weight", "optimizer/0/state", "rng/torch"):
        assert word in str(caught.value)


def test_a_killed_life_counts_batches_up_to_its_death(warm: WarmParents, tmp_path: Path) -> None:
    """A life that skips batches is noticed even if the end agrees."""
    reference = _lives(warm, tmp_path / "reference", Setup())
    resumed = _lives(warm, tmp_path / "other", Setup())
    lines = (tmp_path / "other" / "attempt0.rank0.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "other" / "attempt0.rank0.jsonl").write_text("".join(lines[:2] + lines[3:]), encoding="utf-8")
    with pytest.raises(AssertionError, match="never happened"):
        assert_same_end(reference, resumed)


PHASES: dict[Phase, int] = {
    "batch_start": 4,
    "forward": 4,
    "before_optimizer_step": 4,
    "batch_end": 3,
    "after_batch_end": 4,
    "validation": 4,
}
"""Batches that a life has counted when it is killed at step 4."""
SHORT = {"forward", "batch_end"}
"""Before the count of a batch and behind it. That a scripted kill strikes at all, every campaign requires of each phase."""


@pytest.mark.parametrize(
    ("kill", "batches"),
    [
        pytest.param(Kill(phase=phase, step=4), batches, marks=[pytest.mark.soak] * (phase not in SHORT), id=phase)
        for phase, batches in PHASES.items()
    ],
)
def test_a_kill_strikes_where_it_is_scripted(warm: WarmParents, tmp_path: Path, kill: Kill, batches: int) -> None:
    """The last batch on record is the one before the kill."""
    first, last = _lives(warm, tmp_path, Setup(), kill)
    assert (first.outcome, last.outcome) == ("killed", "finished")
    assert first.steps() == list(range(1, batches + 1))


def test_a_kill_can_strike_between_micro_batches(warm: WarmParents, tmp_path: Path) -> None:
    """The second micro-batch of the third step is the sixth batch."""
    first, _ = _lives(warm, tmp_path, Setup(accumulate=2, epochs=3), Kill(phase="batch_start", step=3, micro=1))
    assert first.steps() == [0, 1, 1, 2, 3, 3]


def test_when_one_rank_dies_the_job_starts_again(warm: WarmParents, tmp_path: Path) -> None:
    """Three processes, one killed: none is left behind, and the next life is a whole job."""
    first, last = _lives(warm, tmp_path, THREE_RANKS, Kill(phase="before_optimizer_step", step=3, rank=2))
    assert (first.outcome, last.outcome) == ("killed", "finished")
    assert first.records(2, "killed")
    assert not first.records(0, "killed")
    assert [len(last.steps(rank)) for rank in range(3)] == [10, 10, 10]
    assert last.end(0)["param/model.head.bias"].equal(last.end(2)["param/model.head.bias"])
    assert not last.end(0)["rng/torch"].equal(last.end(2)["rng/torch"]), "each rank draws its own numbers"


def test_a_kill_at_a_random_time_needs_not_strike(warm: WarmParents, tmp_path: Path) -> None:
    """A run that is over before the timer fires ends the campaign."""
    lives = _lives(warm, tmp_path, Setup(), Kill(phase="random_time", seconds=60.0), must_strike=False)
    assert [life.outcome for life in lives] == ["finished"]
    first, _ = _lives(warm, tmp_path / "soon", Setup(), Kill(phase="random_time", seconds=0.02))
    assert first.outcome == "killed"


def test_a_kill_that_never_strikes_is_a_failure(warm: WarmParents, tmp_path: Path) -> None:
    """A campaign with a typing error in a step number must not pass."""
    with pytest.raises(AttemptFailed, match="outlived"):
        _lives(warm, tmp_path, Setup(), Kill(phase="batch_end", step=99))


def _hang(life: Attempt) -> Mapping[str, Any]:
    (life.workdir / "pid").write_text(str(os.getpid()), encoding="utf-8")
    while True:
        time.sleep(1)


def _break(life: Attempt) -> Mapping[str, Any]:
    raise RuntimeError("this is the reason")


def test_a_hung_life_is_dumped_and_killed(warm: WarmParents, tmp_path: Path) -> None:
    """The failure shows where every thread was."""
    with pytest.raises(AttemptFailed, match=r"hung(.|\n)*in _hang"):
        warm.call(run_attempts, _hang, url="", workdir=tmp_path, timeout=0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), 0)


def test_a_life_that_fails_shows_its_traceback(warm: WarmParents, tmp_path: Path) -> None:
    """An exception is no scripted kill, and its text reaches the test report."""
    with pytest.raises(AttemptFailed, match="this is the reason"):
        warm.call(run_attempts, _break, url="", workdir=tmp_path, kills=[Kill(phase="batch_end", step=1)])


def _no_loss(self: Any, *args: Any) -> Any:
    raise ArithmeticError("replaced")


def test_a_seam_is_replaced_in_every_process(warm: WarmParents, tmp_path: Path) -> None:
    """Ablations depend on it."""
    seam = Seam(module="campaign._training", attribute="Module.training_step", replacement=_no_loss)
    with pytest.raises(AttemptFailed, match="ArithmeticError: replaced"):
        _lives(warm, tmp_path, Setup(), seams=[seam])
    missing = Seam(module="campaign._training", attribute="Module.no_such_step", replacement=_no_loss)
    with pytest.raises(AttemptFailed, match="no_such_step"):
        _lives(warm, tmp_path / "missing", Setup(), seams=[missing])


def test_a_pairwise_matrix_holds_every_allowed_pair() -> None:
    """And far fewer rows than the product."""
    factors: dict[str, list[Any]] = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2], "d": [1, 2]}
    rows = pairwise(factors, allowed=lambda row: row["a"] != row["b"])
    assert all(row["a"] != row["b"] for row in rows)
    found = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    everything = {pair for row in product(factors) for pair in itertools.combinations(row.items(), 2)}
    assert everything - found == {(("a", value), ("b", value)) for value in (1, 2, 3)}
    assert len(rows) <= 12 < len(product(factors))
