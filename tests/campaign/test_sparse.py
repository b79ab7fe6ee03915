"""Sparse-to-dense replay in one process: killed at every step, in replay, in commit, and over and over again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from door import Phase

from campaign._campaign import Campaigns, one_kill_per_step, require_resumed, two_chains
from campaign._pairs import Row, name, pairwise
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import Kill

SPARSE = Setup(checkpointing=Checkpointing(policy="sparse", window=3))

FACTORS: dict[str, list[Any]] = {
    "model": ["lists", "batch_norm", "tied", "stacked", "mixtral"],
    "precision": ["32-true", "bf16-mixed", "bf16-true", "16-mixed"],
    "accumulate": [1, 2, 3],
    "window": [2, 3, 4],
    "order": ["popularity", "fixed", "back_to_front"],
    "optimizer": ["adamw", "adamw_foreach", "adamw_fused", "adam", "sgd"],
    "scheduler": ["none", "cosine", "epoch", "plateau"],
    "clip": [("norm", 0.5), ("value", 0.02), ("norm", None)],
    "workers": [0, 2],
    "loader": ["plain", "stateful"],
}


def allowed(row: Row) -> bool:
    # Lightning refuses to clip for an optimizer that unscales gradients itself.
    clipped = row["clip"][1] is not None
    return not (row["optimizer"] == "adamw_fused" and row["precision"].endswith("mixed") and clipped)


def sparse_setup(row: Row) -> Setup:
    options = {key: value for key, value in row.items() if key not in {"window", "order", "clip"}}
    algorithm, clip = row["clip"]
    checkpointing = Checkpointing(policy="sparse", window=row["window"], order=row["order"])
    return Setup(**options, clip=clip, clip_algorithm=algorithm, checkpointing=checkpointing)


ROWS = pairwise(FACTORS, allowed=allowed)


@pytest.mark.soak
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_killed_at_any_step_the_run_ends_the_same(campaigns: Campaigns, row: Row) -> None:
    """One run per kill; the next life replays and finishes. Neighbouring rows are killed at different steps.

    `make test` has runs drawn from the same factors and more instead, in `test_configurations.py`.
    """
    setup = sparse_setup(row)
    scripts = one_kill_per_step(setup, offset=ROWS.index(row), every=4)
    require_resumed(campaigns.check_all(setup, scripts), scripts, after=_first_generation(row["window"]))


OTHER_MODELS = ("lists", "stacked", "mixtral")
"""Drawn runs have them too."""


@pytest.mark.parametrize(
    "model", ["batch_norm", *(pytest.param(each, marks=pytest.mark.soak) for each in OTHER_MODELS)]
)
def test_killed_at_every_step_of_two_epochs_the_run_ends_the_same(campaigns: Campaigns, model: Any) -> None:
    """In the first window, at the epoch boundary, in validation, after the last step; one run has the kills of many.

    The model of the ordinary run is killed at some of the steps.
    """
    setup = replace(SPARSE, model=model)
    first, second = two_chains(setup)
    in_validation = [Kill(phase="validation", step=step) for step in (2, 7)]
    scripts = [first, second, in_validation] if model in OTHER_MODELS else [first[::2] + second[3:4], in_validation]
    for script, lives in zip(scripts, campaigns.check_all(setup, scripts), strict=True):
        for kill, after in zip(script, lives[1:], strict=True):
            stored = kill.settle and kill.step is not None and kill.step >= _first_generation(window=3)
            assert not stored or after.steps()[:1] != [1], f"{kill} of {script}: started over\n{after.log()}"


def _first_generation(window: int) -> int:
    """Steps after which the first sparse generation is complete for sure: precisions are probed for three steps."""
    return 3 + window + 1


@pytest.mark.parametrize("window", [1, 3])
def test_checkpointing_does_not_change_training(campaigns: Campaigns, window: int) -> None:
    """A run that is never killed ends as it would without the callback."""
    campaigns.check(replace(SPARSE, checkpointing=Checkpointing(policy="sparse", window=window)))


@pytest.mark.parametrize(
    ("accumulate", "steps"),
    [
        pytest.param(3, range(4, 6), marks=pytest.mark.soak),
        pytest.param(2, range(3, 7), marks=pytest.mark.soak),
        pytest.param(3, range(3, 7), marks=pytest.mark.soak),
    ],
)
def test_killed_between_micro_batches_the_run_ends_the_same(
    campaigns: Campaigns, accumulate: int, steps: range
) -> None:
    """Gradients of a half accumulated step are computed again, from the same batches; the last step of an epoch is short."""
    setup = replace(SPARSE, accumulate=accumulate, epochs=4, workers=0)
    kills = [Kill(phase="forward", step=step, micro=micro) for step in steps for micro in range(accumulate)]
    campaigns.check_all(setup, [[kill] for kill in kills if _exists(setup, kill)])


def _exists(setup: Setup, kill: Kill) -> bool:
    """Whether the step has that many micro-batches: the last one of an epoch may have fewer."""
    assert kill.step is not None
    per_epoch = setup.steps // setup.epochs
    last = kill.step % per_epoch == per_epoch - 1
    return (kill.micro or 0) < (setup.batches - (per_epoch - 1) * setup.accumulate if last else setup.accumulate)


AGAIN: list[Phase] = ["batch_start", "before_optimizer_step", "batch_end", "after_batch_end"]


@pytest.mark.parametrize("turn", [0, *(pytest.param(each, marks=pytest.mark.soak) for each in (1, 2, 3, 4))])
def test_killed_again_in_every_step_of_replay(campaigns: Campaigns, turn: int) -> None:
    """A life that dies before it is dense leaves the older generation as good as it was: each phase in another step.

    Two of the phases in an ordinary run; the fourth turn is the first one with all.
    """
    first = Kill(phase="after_batch_end", step=7, settle=10.0)
    scripts = [[first, Kill(phase=phase, batches=(i + turn) % 4 + 1)] for i, phase in enumerate(AGAIN)]
    if turn == 0:
        scripts = scripts[1:3]
    campaigns.check_all(SPARSE, scripts)


WRITES = "^(put|create|delete) "
"""What is left by a kill between two writes is the same wherever it strikes, so it strikes before each."""

RESUMED = Kill(phase="after_batch_end", step=4, settle=10.0)
"""The life before the one that is killed at a write."""

SHORT = replace(SPARSE, batches=3, validate_every=None, checkpointing=Checkpointing(policy="sparse", window=2))


@pytest.mark.parametrize(
    ("before", "operations"),
    [
        pytest.param((), range(0, 31, 10), id="first"),
        pytest.param((), range(30), id="first, all", marks=pytest.mark.soak),
        pytest.param((RESUMED,), range(40), id="second, all", marks=pytest.mark.soak),
    ],
)
def test_killed_at_every_write_to_storage(campaigns: Campaigns, before: tuple[Kill, ...], operations: range) -> None:
    """Segments, markers, manifests, log entries and deletions, of a life that begins or one that resumed."""
    kills = [Kill(phase="storage", verb=WRITES, operation=operation) for operation in operations]
    lives = campaigns.check_all(SHORT, [[*before, kill] for kill in kills], must_strike=False)
    assert len(lives[0]) == len(before) + 2, "the first write is killed"
    assert len(lives[-1]) == len(before) + 1, "there are fewer writes than kills: none was missed"


@pytest.mark.soak
def test_killed_at_random_times(campaigns: Campaigns) -> None:
    """Wherever the threads happen to be."""
    scripts = [[Kill(phase="random_time", seconds=0.01 * k)] for k in range(2, 17, 3)]
    campaigns.check_all(SPARSE, scripts, must_strike=False)


@pytest.mark.parametrize(
    "window", [4, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)]
)
def test_a_run_killed_every_window_and_two_steps_still_finishes(campaigns: Campaigns, window: int) -> None:
    """Capture goes on in replay, so that every life that outlives a window gains a step."""
    setup = replace(SPARSE, checkpointing=Checkpointing(policy="sparse", window=window))
    kill = Kill(phase="after_batch_end", batches=window + 2, settle=10.0)
    lives = campaigns.check(setup, *[kill] * (2 * setup.steps), must_strike=False)
    assert len(lives) > 2, "it was killed"
    reached = [max(life.steps()) for life in lives]
    assert reached[:-1] == sorted(set(reached[:-1])), "every life got further than the one before"


def test_a_generation_survives_a_change_of_loader_workers(campaigns: Campaigns) -> None:
    """Nothing about data position is tied to a worker when items do not draw numbers."""
    before = replace(SPARSE, augment=False, workers=2)
    campaigns.check_stages(replace(before, epochs=1), replace(before, workers=0))


@pytest.mark.soak
def test_means_over_an_interrupted_epoch_are_those_of_the_whole_epoch(campaigns: Campaigns) -> None:
    """Replayed steps count once."""
    setup = replace(SPARSE, epoch_metrics=True)
    campaigns.check_all(setup, one_kill_per_step(setup, offset=1, every=3))
