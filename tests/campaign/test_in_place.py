"""Runs that a failure elsewhere aborts at every kind of place, and that go on in the same process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from torch.amp import GradScaler
from torch.nn import BatchNorm1d, ModuleDict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from campaign._campaign import Campaigns, _require_same_end, _rings, checkpoints
from campaign._in_place import Abort, Begun, Tally, Traced, train_in_place
from campaign._models import Residual
from campaign._supervised import run_supervised
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt import _lightning_in_place
from lightning_moe_ckpt.testing._attempts import AttemptResult, Seam
from lightning_moe_ckpt.testing._kill import Kill
from lightning_moe_ckpt.testing._records import differences

SPARSE = Traced(checkpointing=Checkpointing(policy="sparse", window=3))
DENSE = Traced(checkpointing=Checkpointing(policy="dense"))
SEVERAL = Traced(checkpointing=Checkpointing(policy="dense", every_n_steps=3), model="lists", scheduler="plateau")
SCALED = replace(SPARSE, precision="16-mixed", overflow_steps=(2, 5))


def check(campaigns: Campaigns, setup: Traced, *scripts: Sequence[Abort]) -> list[AttemptResult]:
    """Run every script in one process each, and require the end of the fault-free run."""
    lives = []
    for script in scripts:
        (life,) = campaigns.check(setup, fit=partial(train_in_place, setup, script))
        lives.append(life)
    return lives


SETUPS = pytest.mark.parametrize(
    "setup",
    [SPARSE, *(pytest.param(each, marks=pytest.mark.soak) for each in (SCALED, DENSE, SEVERAL))],
    ids=["sparse", "scaled", "dense", "every_3"],
)
PHASES = [
    "batch_start",
    "forward",
    "after_backward",
    "before_optimizer_step",
    "batch_end",
    "after_batch_end",
    "validation",
]
STEP = ["fetch", "reconcile", "seal", "optimizer", "clip", "boundary", "window", "capture", "hand_over", "schedulers"]
BEGIN = ["open", "join_tiers", "load", "resume", "fit_start", "sanity", "loaders", "position", "train_start"]
END = ["epoch_start", "epoch_end", "compute", "file", "epoch_metrics", "end"]


def chain(places: Sequence[str], *, nth: int = 1, after: bool = False) -> list[Abort]:
    """One after the other."""
    return [Abort(place=place, nth=nth, after=after) for place in places]


@SETUPS
def test_a_step_is_aborted_in_every_phase(campaigns: Campaigns, setup: Traced) -> None:
    """The very next one of the steps that are repeated, too."""
    check(campaigns, setup, chain(PHASES), chain(PHASES[::2], nth=3), chain(PHASES[1::2], nth=3))


@pytest.mark.parametrize("setup", [SCALED, SEVERAL], ids=["scaled", "every_3"])
def test_other_precisions_and_policies(campaigns: Campaigns, setup: Traced) -> None:
    """A few phases; `make soak` has all."""
    check(
        campaigns, setup, chain(["after_backward", "before_optimizer_step", "validation", "seal", "batch_end", "clip"])
    )


@SETUPS
def test_checkpointing_is_aborted_in_every_call(campaigns: Campaigns, setup: Traced) -> None:
    """As each begins, and as it ends."""
    check(campaigns, setup, chain(STEP), chain(STEP, after=True), chain(STEP[::3], nth=3), chain(STEP[1::3], nth=3))


@SETUPS
def test_a_recovery_is_aborted(campaigns: Campaigns, setup: Traced) -> None:
    """Each time another one begins, which is aborted a little later."""
    setup, first = replace(setup, sanity=2), Abort(place="after_backward", nth=8)
    check(campaigns, setup, [first, *chain(BEGIN)], [first, *chain(BEGIN, after=True)])


@SETUPS
def test_the_end_of_an_epoch_and_of_the_fit_are_aborted(campaigns: Campaigns, setup: Traced) -> None:
    check(campaigns, setup, chain(END), chain(END[:4], nth=2))


def test_behind_the_last_step_the_run_is_found_finished(campaigns: Campaigns) -> None:
    """As by a new process: hooks at the end of training do not come again, and weights are those of the end."""
    for abort in (Abort(place="stop", after=True), Abort(place="train_end"), Abort(place="train_end", after=True)):
        (life,) = campaigns.run(SPARSE, fit=partial(train_in_place, SPARSE, [abort]))
        (reference,) = campaigns.reference(SPARSE)
        kept = ("param/", "buffer/", "optimizer/", "scheduler/", "requires_grad/", "progress/global_step")
        ends = ({k: v for k, v in each.end().items() if k.startswith(kept)} for each in (reference, life))
        assert not differences(*ends)


def begin_anew(campaigns: Campaigns, setup: Traced, script: Sequence[Abort], **options: Any) -> list[AttemptResult]:
    """Run a script of which the first abort finds nothing in storage."""
    fit = partial(train_in_place, setup, script, stores_later=True)
    return campaigns.check(setup, fit=fit, may_complain=True, **options)


@pytest.mark.parametrize("setup", [SPARSE, pytest.param(SEVERAL, marks=pytest.mark.soak)], ids=["sparse", "every_3"])
def test_a_replay_is_aborted(campaigns: Campaigns, setup: Traced) -> None:
    """In its first steps and its last; a fit that never gets beyond it still ends."""
    first = Abort(place="before_optimizer_step", nth=9)
    check(
        campaigns,
        setup,
        [first, *chain(["replayed"] * 3)],
        [first, *chain(["forward", "replayed", "boundary"] * 2, after=False)],
    )


@pytest.mark.parametrize(
    "setup",
    [SPARSE, *(pytest.param(each, marks=pytest.mark.soak) for each in (SEVERAL, SCALED))],
    ids=["sparse", "every_3", "scaled"],
)
@pytest.mark.parametrize(
    "place", ["generation_0", "reconcile", "forward", "before_optimizer_step", "batch_end", "sanity", "train_start"]
)
def test_before_the_first_generation_training_begins_anew(campaigns: Campaigns, setup: Traced, place: str) -> None:
    """With what the module had, although the process has trained it since."""
    script = [Abort(place=place, nth=1 if place in {"generation_0", "sanity", "train_start"} else 2)] * 2
    (life,) = begin_anew(campaigns, setup, script)
    assert life.log().count("begins from nothing") >= 2


# -- ranks that die


def check_killed(campaigns: Campaigns, setup: Setup, *kills: Kill, **options: Any) -> list[AttemptResult]:
    """Run with ranks that die, are replaced, and join those that go on in place; require the end of the fault-free run."""
    folder = campaigns._folder()
    arguments: dict[str, Any] = {"url": checkpoints(folder).as_uri(), "workdir": folder, "world_size": setup.world_size}
    lives = campaigns._warm.call(run_supervised, setup.fit, kills=kills, **arguments, **options)
    _require_same_end(campaigns.reference(setup), lives, kills)
    assert not _rings(folder)
    return lives


DENSE_3 = Setup(world_size=3, checkpointing=Checkpointing(policy="dense"))
SPARSE_3 = Setup(
    model="stacked",
    options=(("num_experts", 12),),
    world_size=3,
    expert_parallel=3,
    checkpointing=Checkpointing(policy="sparse", window=3),
)
SPARSE_4 = replace(SPARSE_3, world_size=4, expert_parallel=2, scheduler="plateau", epoch_metrics=True)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_dies_and_the_others_stay(campaigns: Campaigns, rank: int) -> None:
    """The first one too, which speaks for all."""
    check_killed(campaigns, DENSE_3, Kill(phase="forward", step=6, rank=rank, settle=5.0))


@pytest.mark.parametrize(
    ("setup", "kills"),
    [
        (SPARSE_3, [("forward", 4, 0), ("after_backward", 7, 2), ("validation", 9, 1)]),
        (SPARSE_3, [("batch_end", 3, 1), ("before_optimizer_step", 6, 0), ("after_batch_end", 9, 1)]),
        (SPARSE_4, [("batch_start", 5, 3), ("epoch_end", 10, 0)]),
        (SPARSE_4, [("epoch_start", 5, 0), ("forward", 5, 2)]),
    ],
)
def test_ranks_die_one_after_another(campaigns: Campaigns, setup: Setup, kills: list[tuple[Any, int, int]]) -> None:
    check_killed(campaigns, setup, *(Kill(phase=phase, step=step, rank=rank) for phase, step, rank in kills))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_before_there_is_a_generation(campaigns: Campaigns, rank: int) -> None:
    """What replaces it gets the weights at the start from others; experts that nobody else has come from its own seed."""
    for setup in (DENSE_3, SPARSE_3):
        check_killed(campaigns, setup, Kill(phase="forward", step=0, rank=rank), same_seed=True)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_ranks_die_at_any_time(campaigns: Campaigns, seed: int) -> None:
    """In recoveries of others too; a rank that has finished meanwhile does not die."""
    draw = random.Random(seed)
    setup = draw.choice([DENSE_3, SPARSE_3, SPARSE_4])
    ranks = [draw.randrange(setup.world_size) for _ in range(draw.randint(1, 4))]
    kills = [Kill(phase="random_time", seconds=draw.uniform(0.0, 0.8), rank=rank) for rank in ranks]
    check_killed(campaigns, setup, *kills, same_seed=True, must_strike=False)


# -- without any one of the resets


def _nothing(*args: Any, **options: Any) -> None:
    """Resets nothing."""


LATE, EARLY = Abort(place="before_optimizer_step", nth=8), Abort(place="batch_end", nth=2)


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A reset that is taken away, and what is seen then."""

    module: str
    attribute: str
    seen: str
    """Part of the failure, a regular expression."""
    replacement: Any = _nothing
    setup: Traced = SPARSE
    abort: Abort = LATE
    anew: bool = False
    """Whether the run is aborted before there is a generation."""

    def check(self, campaigns: Campaigns, **options: Any) -> None:
        if self.anew:
            begin_anew(campaigns, self.setup, [self.abort], **options)
        else:
            campaigns.check(self.setup, fit=partial(train_in_place, self.setup, [self.abort]), **options)


MEMENTO, IN_PLACE = "lightning_moe_ckpt.fit._memento", "lightning_moe_ckpt.fit._in_place"
RECORDER = "lightning_moe_ckpt.fit._recorder"
apart = partial(Ablation, module="lightning_moe_ckpt._lightning_in_place", attribute="APART")


def left_alone(*kinds: type) -> tuple[type, ...]:
    """Objects of these types are not reset."""
    return (*_lightning_in_place.APART, *kinds)


ABLATIONS: dict[str, Ablation] = {
    "attributes": Ablation(module=MEMENTO, attribute="_restore_space", seen="Error"),
    "module": apart(replacement=left_alone(LightningModule), seen="param/"),
    "parts of the module": apart(replacement=left_alone(ModuleDict, BatchNorm1d, Residual), seen="loss"),
    "metrics": apart(replacement=left_alone(Metric), seen="rows", anew=True, abort=EARLY),
    "callbacks": apart(replacement=left_alone(Begun), seen="batches of another incarnation"),
    "objects of the user's": apart(replacement=left_alone(Tally), seen="assert "),
    "optimizer": apart(replacement=left_alone(Optimizer), seen="optimizer/0/state", anew=True, abort=EARLY),
    "schedulers": apart(replacement=left_alone(LRScheduler), seen="scheduler/0", anew=True, abort=EARLY),
    "stage of the scaler": apart(replacement=left_alone(GradScaler), seen="unscale_", setup=SCALED),
    "loops": apart(replacement=left_alone(_Loop), seen="Error", anew=True, abort=EARLY),
    "progress": apart(replacement=left_alone(_BaseProgress), seen="differences", anew=True, abort=EARLY),
    "tensors": Ablation(module=MEMENTO, attribute="_restore_tensor", seen="assert "),
    "hooks of parameters": Ablation(module=MEMENTO, attribute="_restore_leaf", seen="loss"),
    "random numbers": Ablation(module=MEMENTO, attribute="restore_rng", seen="loss", anew=True, abort=EARLY),
    "weights at the start": Ablation(module=IN_PLACE, attribute="restore_values", seen="loss", anew=True, abort=EARLY),
    "files and rows": Ablation(module=IN_PLACE, attribute="FitSession.begin_anew", seen="rows", anew=True, abort=EARLY),
    "buffers": Ablation(module="lightning_moe_ckpt.recovery._replay", attribute="Replay.load_buffers", seen="buffer/"),
    "epoch metrics": Ablation(module="lightning_moe_ckpt._lightning_metrics", attribute="restore_metrics", seen="metrics"),
    "states of callbacks": Ablation(module=RECORDER, attribute="BoundaryRecorder._resume_callbacks", seen="last-v1"),
    "counters": Ablation(
        module="lightning_moe_ckpt._lightning_attributes", attribute="MovedAttributes.restore", seen="counters"
    ),
    "rates": Ablation(module=RECORDER, attribute="BoundaryRecorder._restore_rates", seen="lr "),
    "random state": Ablation(module=RECORDER, attribute="restore_rng", seen="loss"),
    "scale": Ablation(
        module="campaign._training", attribute="MixedPrecision.load_state_dict", seen="precision/", setup=SCALED
    ),
    "what trains": Ablation(module="lightning_moe_ckpt.fit._state", attribute="Trained.restore", seen="requires_grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", ABLATIONS)
def test_without_the_reset_the_run_is_not_exact(campaigns: Campaigns, name: str) -> None:
    """Its control are the tests above, with aborts at the same places."""
    ablation = ABLATIONS[name]
    seam = Seam(module=ablation.module, attribute=ablation.attribute, replacement=ablation.replacement)
    with pytest.raises(AssertionError, match=ablation.seen):
        ablation.check(campaigns, seams=[seam])


@pytest.mark.soak
@pytest.mark.parametrize("name", ABLATIONS)
def test_with_the_reset_the_run_is_exact(campaigns: Campaigns, name: str) -> None:
    """The control."""
    ABLATIONS[name].check(campaigns)
