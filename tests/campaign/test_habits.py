"""What users change while they train: frozen parameters, groups of the optimizer, clipping by value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns
from campaign._habits import Habit
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import Kill

SPARSE = Checkpointing(policy="sparse", window=3)
DENSE = Checkpointing(policy="dense", every_n_steps=2)
EITHER = [("value", None), ("norm", "all but experts")]
OTHERS = [("epochs", DENSE), ("start", SPARSE), ("steps", SPARSE), ("steps", DENSE)]


def killed(*steps: int) -> list[Kill]:
    return [Kill(phase="after_batch_end", step=step, settle=10.0) for step in steps]


@pytest.mark.parametrize(
    ("freezes", "checkpointing"),
    [("epochs", SPARSE), ("start", DENSE), *(pytest.param(*each, marks=pytest.mark.soak) for each in OTHERS)],
)
def test_what_the_user_froze_stays_frozen_and_nothing_else(
    campaigns: Campaigns, freezes: Any, checkpointing: Checkpointing
) -> None:
    """In the step at which the run resumes, in the steps it replays, and after them."""
    setup = Habit(freezes=freezes, epochs=3, checkpointing=checkpointing)
    campaigns.check(setup, *killed(4, 8, 12))


@pytest.mark.parametrize(
    "checkpointing", [SPARSE, pytest.param(DENSE, marks=pytest.mark.soak)], ids=["sparse", "dense"]
)
def test_a_group_that_is_added_while_training_comes_back(campaigns: Campaigns, checkpointing: Checkpointing) -> None:
    """Killed before the epoch in which it is added, in that epoch, and in a later one."""
    setup = Habit(unfreezes_at=1, epochs=3, scheduler="epoch", checkpointing=checkpointing)
    campaigns.check(setup, *killed(4, 6, 9, 12))


@pytest.mark.parametrize(
    ("algorithm", "freezes"),
    [("value", "all but experts"), *(pytest.param(*each, marks=pytest.mark.soak) for each in EITHER)],
)
def test_replay_begins_where_nothing_has_a_gradient(campaigns: Campaigns, algorithm: Any, freezes: Any) -> None:
    """The first slot of the window has nothing but an expert that gets no tokens."""
    experts = tuple(f"model.moe/expert.{index}" for index in range(4))
    dense = tuple(f"model.{name}" for name in ("embedding", "norm", "dense", "moe/router", "head"))
    checkpointing = Checkpointing(policy="sparse", schedule=(experts[3:], (*experts[:3], *dense)))
    setup = Habit(clip_algorithm=algorithm, freezes=freezes, checkpointing=checkpointing).with_options(
        never_routed=True
    )
    campaigns.check(setup, *killed(7))


@pytest.mark.parametrize(
    "tunes",
    [
        {"finds": "batch_size"},
        {"tunes": "lr"},
        pytest.param({"finds": "lr"}, marks=pytest.mark.soak),
        pytest.param({"tunes": "batch_size"}, marks=pytest.mark.soak),
    ],
)
def test_trial_steps_are_not_the_runs(campaigns: Campaigns, tunes: Any) -> None:
    """A run that is killed in its first steps, and later, has the settings that were found once, and its own steps."""
    setup = Habit(checkpointing=SPARSE, scheduler="none", **tunes)
    lives = campaigns.check(setup, Kill(phase="forward", step=1), *killed(5, 8))
    assert lives[1].steps()[0] == 1


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_steps_that_the_module_takes_by_itself_are_the_same(campaigns: Campaigns, steps: int) -> None:
    """One for each batch, or several."""
    campaigns.check(Habit(manual=steps, clip=None, checkpointing=DENSE), *killed(3 * steps, 7 * steps))


def test_a_run_that_begins_from_a_file_in_mid_epoch_sees_the_same_batches_again(campaigns: Campaigns) -> None:
    """Lightning counts on and begins with the first batch; a restart in that epoch fetches no more than was fetched, nor less."""
    setup = Habit(from_file=True, inside=True, epochs=3, validate_every=None, checkpointing=DENSE)
    campaigns.check(setup, Kill(phase="forward", step=3), *killed(4, 8))


@pytest.mark.parametrize(
    "checkpointing", [SPARSE, pytest.param(DENSE, marks=pytest.mark.soak)], ids=["sparse", "dense"]
)
def test_a_run_that_begins_from_a_file_goes_on_from_its_own_checkpoints(
    campaigns: Campaigns, checkpointing: Checkpointing
) -> None:
    """Also if it is killed before the first of them; every life is given the file."""
    setup = Habit(from_file=True, checkpointing=checkpointing)
    lives = campaigns.check(setup, Kill(phase="forward", step=3), *killed(4, 8))
    assert "begin.ckpt is not loaded" in lives[-1].log()


SHARDED: dict[str, Habit] = {
    "added group": Habit(unfreezes_at=1, epochs=3, scheduler="epoch", checkpointing=SPARSE),
    "added group, dense": Habit(unfreezes_at=1, epochs=3, scheduler="epoch", checkpointing=DENSE),
    "by the step": Habit(freezes="steps", epochs=3, checkpointing=SPARSE),
    "by the epoch": Habit(freezes="epochs", epochs=3, checkpointing=DENSE),
    "from the start": Habit(freezes="start", epochs=3, checkpointing=SPARSE),
    "by hand": Habit(manual=1, clip=None, checkpointing=DENSE),
    "several steps by hand": Habit(manual=2, clip=None, checkpointing=DENSE),
    "looks for a rate": Habit(finds="lr", scheduler="none", checkpointing=SPARSE),
    "tunes a rate": Habit(tunes="lr", scheduler="none", checkpointing=SPARSE),
    "from a file": Habit(from_file=True, checkpointing=SPARSE),
}


@pytest.mark.parametrize(
    "name", [name if i == 0 else pytest.param(name, marks=pytest.mark.soak) for i, name in enumerate(SHARDED)]
)
def test_habits_are_the_same_under_sharded_optimizers(campaigns: Campaigns, name: str) -> None:
    """Of three ranks, one of which is killed. What thaws later is whole on all."""
    setup = replace(SHARDED[name], world_size=3, shard_optimizer=True)
    steps = (4, 8) if not setup.manual else (3 * setup.manual, 7 * setup.manual)
    campaigns.check(setup, *[replace(kill, rank=2) for kill in killed(*steps)])
