"""SIGTERM, Ctrl-C, exceptions and normal ends: clean, and the next start goes on exactly where the stop was."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from door import Phase

from campaign._campaign import Campaigns
from campaign._drawn import Drawn
from campaign._stops import Repeating, looking_around, require_clean, require_same_training, seconds_to_end, twice
from campaign._training import Checkpointing, Setup
from campaign._variants import Variant
from lightning_moe_ckpt.fit._recorder import BoundaryRecorder
from lightning_moe_ckpt.testing import AttemptResult, Kill, Seam

SPARSE = Setup(batches=4, checkpointing=Checkpointing(policy="sparse", window=3))
DENSE = replace(SPARSE, checkpointing=Checkpointing(policy="dense", every_n_steps=100))
STOPPED = 128 + signal.SIGTERM
PATIENT = Seam(module="lightning_moe_ckpt.process._stop_signal", attribute="PATIENCE_SECONDS", replacement=20.0)
"""However busy the machine is, a first step is waited for."""


def term(phase: Any, **place: Any) -> Kill:
    return Kill(phase=phase, signal=signal.SIGTERM, **place)


def check(campaigns: Campaigns, setup: Setup, *scripts: list[Kill], **options: Any) -> list[list[AttemptResult]]:
    """Run every script; each stopped life must be clean, and the end that of the undisturbed run."""
    options = {"fit": looking_around(setup), **options}
    options["seams"] = [PATIENT, *options.get("seams", [])]
    results = campaigns.check_all(setup, scripts, **options)
    for lives in results:
        stopped = [life for life in lives if life.outcome != "killed"]
        require_clean(stopped)
        for life in stopped[:-1]:
            print(f"signal to end, by rank: {[f'{seconds:.2f}' for seconds in seconds_to_end(life)]} s")
    return results


@pytest.mark.parametrize(
    ("setup", "world_size"),
    [
        pytest.param(DENSE, 1, id="dense-1"),
        pytest.param(DENSE, 3, id="dense-3", marks=pytest.mark.soak),
        pytest.param(SPARSE, 1, id="sparse-1", marks=pytest.mark.soak),
        pytest.param(SPARSE, 3, id="sparse-3"),
    ],
)
def test_after_sigterm_to_one_rank_all_go_on_at_the_step_they_stopped_at(
    campaigns: Campaigns, setup: Setup, world_size: int
) -> None:
    """Sent in the forward pass of step 6 to the last rank: all take that step, store it, and leave with 143."""
    setup = replace(setup, world_size=world_size)
    (lives,) = check(campaigns, setup, [term("forward", step=5, rank=world_size - 1)])
    assert set(lives[0].exit_codes.values()) == {STOPPED}
    for rank in range(world_size):
        assert lives[0].steps(rank)[-1] == 6
        assert lives[1].steps(rank)[0] == 7


PLACES = [
    (term("batch_start", step=0), 1),
    (term("before_optimizer_step", step=5), 6),
    (term("validation", step=6), 6),
    (term("epoch_end", step=4), 4),
    (term("after_batch_end", step=8), 8),
]
MORE_PLACES = [
    (term("batch_start", step=5), 6),
    (term("batch_end", step=5), 5),
    (term("after_batch_end", step=5), 5),
    (term("batch_end", step=4), 4),
    (term("epoch_start", step=4), 4),
]
"""Where the signal comes, and the last step that is taken."""


@pytest.mark.parametrize("places", [PLACES, pytest.param(MORE_PLACES, marks=pytest.mark.soak)], ids=["some", "more"])
def test_sigterm_anywhere_loses_no_step(campaigns: Campaigns, places: list[tuple[Kill, int]]) -> None:
    """In a step, in validation, between epochs, after the last step: the next step is the first of the next life."""
    results = check(campaigns, SPARSE, *[[kill] for kill, _ in places])
    for lives, (kill, last) in zip(results, places, strict=True):
        assert lives[0].exit_codes == {0: STOPPED}, kill
        assert lives[0].steps()[-1] == last, kill
        assert lives[1].steps() == list(range(last + 1, 9)), kill


WITH_WORKERS = Drawn(batches=4, workers=2, checkpointing=SPARSE.checkpointing)


@pytest.mark.parametrize(
    ("setup", "kill"),
    [
        pytest.param(WITH_WORKERS, term("forward", step=5), id="sparse"),
        pytest.param(replace(WITH_WORKERS, persistent=True), term("after_batch_end", step=5), id="persistent"),
        pytest.param(replace(WITH_WORKERS, loader="stateful"), term("batch_start", step=4), id="stateful"),
        pytest.param(
            replace(WITH_WORKERS, world_size=3),
            term("forward", step=5, everyone=True),
            id="ranks",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_sigterm_to_loader_workers_too_loses_no_step(campaigns: Campaigns, setup: Drawn, kill: Kill) -> None:
    """As SLURM sends it to every process of a job: workers go on until their loader ends them."""
    (lives,) = check(campaigns, setup, [replace(kill, group=True)])
    assert set(lives[0].exit_codes.values()) == {STOPPED}
    assert lives[1].steps()[0] == lives[0].steps()[-1] + 1


def test_sigterm_in_the_sanity_check_leaves_before_the_first_step(campaigns: Campaigns) -> None:
    """There is nothing to save; the next life begins from nothing."""
    setup = Variant(batches=4, checkpointing=SPARSE.checkpointing, trainer=(("num_sanity_val_steps", 2),))
    (lives,) = check(campaigns, setup, [term("sanity_check")])
    assert lives[0].exit_codes == {0: STOPPED}
    assert lives[0].steps() == []


@pytest.mark.soak
def test_a_stop_in_mid_epoch_taken_for_the_end_of_one_is_noticed(campaigns: Campaigns) -> None:
    """The comparison fails if the start half of the boundary is another one."""
    end_of_epoch = Seam(
        module="lightning_moe_ckpt.fit._recorder",
        attribute="BoundaryRecorder.take_stopped",
        replacement=BoundaryRecorder.take_end,
    )
    with pytest.raises(AssertionError, match="differences from the fault-free run"):
        check(campaigns, SPARSE, [term("forward", step=5)], seams=[end_of_epoch])


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_sigterm_in_replay_leaves_at_once(campaigns: Campaigns, world_size: int) -> None:
    """No dense state exists there; what the replay began from is committed, and the next life begins from it again."""
    setup = replace(SPARSE, world_size=world_size)
    killed = Kill(phase="after_batch_end", step=7, settle=10.0)
    (lives,) = check(campaigns, setup, [killed, term("forward", batches=1)])
    assert set(lives[1].exit_codes.values()) == {STOPPED}
    assert len(lives[1].steps()) == 1
    assert lives[2].steps()[0] == lives[1].steps()[0] > 1


def test_sigterm_between_micro_batches_waits_for_the_step(campaigns: Campaigns) -> None:
    """Gradients that are half accumulated are not lost."""
    setup = replace(SPARSE, accumulate=2, epochs=3)
    (lives,) = check(campaigns, setup, [term("forward", step=2, micro=0)])
    assert (lives[0].steps()[-1], lives[1].steps()[0]) == (3, 3), "two micro-batches each"


@pytest.mark.parametrize(
    "setup",
    [
        replace(SPARSE, world_size=4, model="stacked", expert_parallel=2),
        # Bits of DistributedDataParallel survive a restart with two ranks only.
        pytest.param(replace(SPARSE, world_size=2, strategy="ddp"), marks=pytest.mark.soak),
    ],
    ids=["expert-parallel", "ddp"],
)
@pytest.mark.parametrize(
    "sent",
    [
        term("random_time", seconds=0.05, everyone=True),
        # To the last of three ranks it is sent above.
        pytest.param(term("batch_end", step=3, rank=1), marks=pytest.mark.soak),
    ],
    ids=["all", "one"],
)
def test_sigterm_to_all_ranks_or_to_one_stops_all_at_one_step(campaigns: Campaigns, setup: Setup, sent: Kill) -> None:
    """As launchers do, wherever the ranks happen to be; in the long campaign to a rank that is not 0."""
    (lives,) = check(campaigns, setup, [sent])
    assert set(lives[0].exit_codes.values()) == {STOPPED}
    assert len({tuple(lives[0].steps(rank)) for rank in range(setup.world_size)}) == 1
    assert lives[0].steps() + lives[1].steps() == list(range(1, 9))


def test_a_second_sigterm_leaves_at_once(campaigns: Campaigns) -> None:
    """In mid-step; nothing of it is saved, and what was committed is there."""
    now = Seam(module="lightning_moe_ckpt.process._stop_signal", attribute="REPEAT_SECONDS", replacement=0.0)
    setup = Repeating(batches=4, checkpointing=Checkpointing(policy="dense", every_n_steps=2))
    (lives,) = check(campaigns, setup, [term("forward", step=5, settle=10.0)], seams=[now])
    assert lives[0].exit_codes == {0: STOPPED}
    assert lives[0].steps()[-1] == 5
    assert lives[1].steps()[0] == 5


@pytest.mark.parametrize(
    ("world_size", "phases"), [pytest.param(1, ["validation"], marks=pytest.mark.soak), (3, ["forward"])]
)
def test_after_ctrl_c_the_run_ends_the_same(campaigns: Campaigns, world_size: int, phases: list[Phase]) -> None:
    """In mid-step, when no state is whole: what is complete is committed, and Lightning exits with 1."""
    setup = replace(SPARSE, world_size=world_size)
    kills = [Kill(phase=phase, step=6, signal=signal.SIGINT, everyone=True) for phase in phases]
    for lives in check(campaigns, setup, *[[kill] for kill in kills]):
        assert set(lives[0].exit_codes.values()) == {1}
        assert lives[1].steps()[0] > 1, "it did not start over"


def test_after_an_exception_the_same_process_fits_again_and_ends_the_same(campaigns: Campaigns) -> None:
    """The user's own exception comes out of fit, and nothing is left behind that the second fit would trip over."""
    phases: list[Phase] = ["forward", "before_optimizer_step", "batch_end", "validation"]
    booms = [Kill(phase=phase, step=6, signal=signal.SIGUSR2) for phase in phases]
    booms.append(Kill(phase="epoch_end", step=4, signal=signal.SIGUSR2))
    for (life,) in campaigns.check_all(SPARSE, [[boom] for boom in booms], fit=twice(SPARSE), must_strike=False):
        steps = life.steps()
        resumed_at = next(now for now, before in zip(steps[1:], steps, strict=False) if now != before + 1)
        assert 1 < resumed_at <= 6, "it neither started over nor went on as if nothing had happened"
        require_clean([life])


@pytest.mark.parametrize(("policy", "world_size"), [("dense", 1), pytest.param("sparse", 3, marks=pytest.mark.soak)])
def test_more_steps_go_on_in_the_middle_of_an_epoch(campaigns: Campaigns, policy: Any, world_size: int) -> None:
    """A run out of steps stops without hooks of the epoch's end in what is stored; with more steps it never stopped."""
    whole = Variant(
        batches=5,
        world_size=world_size,
        epoch_metrics=True,
        checkpointing=Checkpointing(policy=policy, every_n_steps=100, window=2),
    )
    part = replace(whole, trainer=(("max_steps", 7),))
    lives = campaigns.run_stages(part, whole)
    assert (lives[0].steps()[-1], lives[1].steps()[0]) == (7, 8)
    require_same_training(campaigns.reference(whole), lives)
