"""Runs that a failure elsewhere aborts at every kind of place, and that go on in the same process."""

from __future__ import annotations

import functools
import gc
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from door import JsonLines, read_lines, settle
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from torch.amp import GradScaler
from torch.nn import BatchNorm1d, ModuleDict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric
from typing_extensions import override

from campaign._belongings import Belongings
from campaign._campaign import Campaigns, _require_same_end, _rings, checkpoints, lose_memory
from campaign._draw import Case
from campaign._draw import draw as draw_case
from campaign._habits import Habit
from campaign._in_place import CALLS, Abort, Alone, Begun, Death, Traced, no_place, train_and_die, train_in_place
from campaign._models import Residual
from campaign._nodes import Nodes
from campaign._sharded import Sharded
from campaign._supervised import Storm, nothing, run_supervised
from campaign._training import Checkpointing, Setup
from campaign.test_partial_copies import ruin_all
from campaign.test_peers import train_with_copies_only
from lightning_moe_ckpt.fit.in_place import _survivor
from lightning_moe_ckpt.parallel import _gloo
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill, Seam, differences

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
STEP = ["fetch", "reconcile", "seal", "optimizer", "clip", "boundary", "window", "capture", "schedulers"]
BEGIN = ["open", "join_tiers", "load", "resume", "fit_start", "loaders", "position", "train_start"]
INSIDE = ["in_forward", "in_backward", "in_optimizer"]
TOGETHER = ["reduce", "agree"]
"""Places that one rank alone does not come to."""
RESUMED = ["load", "resume", "position", "replayed"]
"""Places that a rank comes to when there is a generation."""
LAST = ["end", "stop", "train_end"]
"""Places behind which nothing is trained again."""
END = ["epoch_start", "epoch_end", "compute", "file", "epoch_metrics", "end"]


def chain(places: Sequence[str], *, nth: int = 1, after: bool = False) -> list[Abort]:
    """One after the other."""
    return [Abort(place=place, nth=nth, after=after) for place in places]


@SETUPS
def test_a_step_is_aborted_in_every_place(campaigns: Campaigns, setup: Traced) -> None:
    """Calls as they begin and as they end; the very next step of those that are repeated, too."""
    phases, nth = [*PHASES, *INSIDE], 2 if setup is DENSE else 3  # of dense checkpoints few steps are repeated
    check(
        campaigns,
        setup,
        [*chain([*phases, *STEP]), *chain(STEP[:-1], after=True)],
        [*chain(STEP[::3], nth=nth), *chain(phases[::2], nth=nth)],
    )


@pytest.mark.parametrize("setup", [SCALED, pytest.param(SEVERAL, marks=pytest.mark.soak)], ids=["scaled", "every_3"])
def test_other_precisions_and_policies(campaigns: Campaigns, setup: Traced) -> None:
    """A few phases; `make soak` has all."""
    check(
        campaigns, setup, chain(["after_backward", "before_optimizer_step", "validation", "seal", "batch_end", "clip"])
    )


@SETUPS
def test_a_recovery_is_aborted(campaigns: Campaigns, setup: Traced) -> None:
    """Each time another one begins, which is aborted a little later."""
    setup, first = replace(setup, sanity=2), Abort(place="after_backward", nth=8)
    check(campaigns, setup, [first, *chain(BEGIN)], [first, *chain(BEGIN, after=True)])


@SETUPS
@pytest.mark.parametrize(
    "script", [chain(END), pytest.param(chain(END[:4], nth=2), marks=pytest.mark.soak)], ids=["each", "later"]
)
def test_the_end_of_an_epoch_and_of_the_fit_are_aborted(
    campaigns: Campaigns, setup: Traced, script: list[Abort]
) -> None:
    check(campaigns, setup, script)


@pytest.mark.parametrize(
    "setup",
    [SPARSE, *(pytest.param(each, marks=pytest.mark.soak) for each in (SEVERAL, SCALED))],
    ids=["sparse", "every_3", "scaled"],
)
def test_before_the_first_generation_training_begins_anew(campaigns: Campaigns, setup: Traced) -> None:
    """With what the module had, although the process has trained it since; again and again, until something is stored."""
    places = ["generation_0", "reconcile", "forward", "before_optimizer_step", "batch_end", "sanity", "train_start"]
    often = {"reconcile", "forward", "before_optimizer_step", "batch_end"}
    script = [Abort(place=place, nth=2 if place in often else 1) for place in places for _ in range(2)]
    (life,) = begin_anew(campaigns, setup, script)
    assert life.log().count("begins from nothing") >= len(script)


def begin_anew(campaigns: Campaigns, setup: Traced, script: Sequence[Abort], **options: Any) -> list[AttemptResult]:
    """Run a script of which no abort finds anything in storage."""
    fit = partial(train_in_place, setup, script, stores_later=True)
    return campaigns.check(setup, fit=fit, may_complain=True, **options)


def test_behind_the_last_step_the_run_is_found_finished(campaigns: Campaigns) -> None:
    """As by a new process: hooks at the end of training do not come again, and weights are those of the end."""
    for abort in (Abort(place="stop", after=True), Abort(place="train_end"), Abort(place="train_end", after=True)):
        require_finished(campaigns, SPARSE, campaigns.run(SPARSE, fit=partial(train_in_place, SPARSE, [abort])))


def require_finished(campaigns: Campaigns, setup: Setup, lives: Sequence[AttemptResult]) -> None:
    """Weights are those of the fault-free run's end."""
    (reference,) = campaigns.reference(setup)
    kept = ("param/", "buffer/", "optimizer/", "scheduler/", "requires_grad/", "progress/global_step")
    for rank in range(setup.world_size):
        ends = [{k: v for k, v in each.end(rank).items() if k.startswith(kept)} for each in (reference, lives[-1])]
        assert not differences(*ends), rank


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


# -- any training


def drawn(seed: int) -> tuple[Case, list[Abort]]:
    """The run of the random campaign of this number, on one rank, and where it is aborted."""
    case, draw = draw_case(seed), random.Random(-seed)
    setup = replace(case.setup, world_size=1, expert_parallel=1, strategy="moe")
    often, seldom = [*PHASES, *INSIDE, *STEP], [*BEGIN, *END[:-1], *RESUMED]  # behind `end` it is found finished
    script = [Abort(place=draw.choice(often), nth=draw.randint(1, 12))]
    for _ in range(draw.randint(0, 3)):
        place = draw.choice(often if draw.random() < 0.7 else seldom)
        nth = 1 if place in seldom else draw.choice([1, 1, 2, 5, 9])
        script.append(Abort(place=place, nth=nth, after=place in CALLS and draw.random() < 0.3))
    return replace(case, setup=setup), script


def drawn_failure(campaigns: Campaigns, seed: int) -> str | None:
    """What is wrong with such a run, None if nothing is."""
    case, script = drawn(seed)
    fit = partial(train_in_place, case.setup, script, must_reach=False)
    try:
        (campaigns.check if case.named is None else campaigns.run)(case.setup, fit=fit)
    except (AssertionError, RuntimeError, TimeoutError) as error:
        return f"seed {seed}, {script}, MOE_CKPT_CASE='{case.line()}'\n{error}"
    return None


@pytest.mark.parametrize("seed", [0, 4, pytest.param(1, marks=pytest.mark.soak)])
def test_a_drawn_run_goes_on_in_place(campaigns: Campaigns, seed: int) -> None:
    """Whatever a user may vary, see `test_configurations`."""
    found = drawn_failure(campaigns, seed)
    assert found is None, found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_a_thousand_drawn_runs_go_on_in_place(campaigns: Campaigns, chunk: int) -> None:
    """The same, at length."""
    seeds = range(50 * chunk, 50 * chunk + 50)
    found = [each for each in (drawn_failure(campaigns, seed) for seed in seeds) if each is not None]
    assert not found, "\n\n".join([f"{len(found)} of {len(seeds)} drawn runs failed:", *found])


@dataclass(frozen=True, kw_only=True)
class TwoLoggers(Traced):
    """Rows go to both; there is a progress bar, too."""

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        options = super().trainer_options(life)
        board = TensorBoardLogger(options["logger"].save_dir, name="board", version=0)
        return {**options, "logger": [options["logger"], board], "enable_progress_bar": True}


HABITS: dict[str, tuple[Any, str]] = {
    "manual": (Habit(manual=1, clip=None, checkpointing=DENSE.checkpointing), "in_backward"),
    "added group": (Habit(unfreezes_at=1, epochs=3, scheduler="epoch", checkpointing=SPARSE.checkpointing), "in_optimizer"),
    "two loggers": (TwoLoggers(checkpointing=SPARSE.checkpointing), "after_batch_end"),
    "several steps by hand": (Habit(manual=2, clip=None, checkpointing=DENSE.checkpointing), "in_optimizer"),
    "frozen by the epoch": (Habit(freezes="epochs", epochs=3, checkpointing=SPARSE.checkpointing), "in_backward"),
    "frozen by the step": (Habit(freezes="steps", epochs=3, checkpointing=SPARSE.checkpointing), "forward"),
    "looks for a batch size": (Habit(finds="batch_size", scheduler="none", checkpointing=SPARSE.checkpointing), "batch_end"),
    "looks for a rate": (Habit(finds="lr", scheduler="none", checkpointing=SPARSE.checkpointing), "batch_end"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [habit if i < 2 else pytest.param(habit, marks=pytest.mark.soak) for i, habit in enumerate(HABITS)]
)
def test_what_users_do_beside_training_goes_on_in_place(campaigns: Campaigns, name: str) -> None:
    """Early and late, in an epoch and behind its end."""
    setup, place = HABITS[name]
    script = [Abort(place=place, nth=nth) for nth in (2, 7, 4, 9)]
    (life,) = campaigns.check(setup, fit=partial(train_in_place, setup, script, must_reach=False))
    assert int(re.findall(r"^aborted (\d+) times$", life.log(), re.MULTILINE)[-1]) > 1


# -- ranks that die


def check_killed(campaigns: Campaigns, setup: Setup, *kills: Kill, **options: Any) -> list[AttemptResult]:
    """Run with ranks that die, are replaced, and join those that go on in place; require the end of the fault-free run."""
    lives = run_killed(campaigns, setup, *kills, **options)
    _require_same_end(campaigns.reference(setup, timeout=options.get("timeout", 60.0)), lives, kills)
    return lives


def run_killed(campaigns: Campaigns, setup: Setup, *kills: Kill, **options: Any) -> list[AttemptResult]:
    """Run, and require that nothing is left in shared memory."""
    folder = campaigns._folder()
    arguments: dict[str, Any] = {"url": checkpoints(folder).as_uri(), "workdir": folder, "world_size": setup.world_size}
    patience, fit = 20.0 + options.get("timeout", 60.0), options.pop("fit", setup.fit)
    lives = campaigns._warm.call(run_supervised, fit, kills=kills, patience=patience, **arguments, **options)
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


@pytest.mark.parametrize(
    ("setup", "rank"),
    [
        ("sparse", 0),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("sparse", 1), ("dense", 0), ("dense", 1))),
    ],
)
def test_a_rank_dies_before_there_is_a_generation(campaigns: Campaigns, setup: str, rank: int) -> None:
    """What replaces it gets the weights at the start from others; experts that nobody else has come from its own seed."""
    kill = Kill(phase="forward", step=0, rank=rank)
    check_killed(campaigns, {"sparse": SPARSE_3, "dense": DENSE_3}[setup], kill, same_seed=True)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_a_rank_with_experts_of_hugging_face_dies(campaigns: Campaigns, policy: Any) -> None:
    """What replaces it builds a whole model, and cuts it before it meets the others; then it gets its experts."""
    checkpointing = Checkpointing(policy=policy, window=3)
    setup = Sharded(sharding="hf+ep", world_size=4, family="qwen3_moe", num_experts=2, checkpointing=checkpointing)
    kills = [Kill(phase="forward", step=0, rank=1), Kill(phase="after_backward", step=5, rank=2)]
    check_killed(campaigns, setup, *kills, same_seed=True)


@pytest.mark.parametrize("policy", ["sparse", pytest.param("dense", marks=pytest.mark.soak)])
def test_a_rank_with_pieces_of_an_optimizer_dies(campaigns: Campaigns, policy: Any) -> None:
    """What replaces it gets its pieces, and all weights from their owners."""
    setup = replace(DENSE_3, shard_optimizer=True, checkpointing=Checkpointing(policy=policy, window=3))
    check_killed(campaigns, setup, Kill(phase="after_backward", step=6, rank=1), same_seed=True)


PLACES = [
    *PHASES,
    *INSIDE,
    *STEP,
    *(each for each in BEGIN if each not in RESUMED),
    *END[:-1],
    "generation_0",
    "hand_over",
]
TRACED_1 = Alone(sanity=2, checkpointing=SPARSE.checkpointing)
TRACED_3 = Traced(world_size=3, sanity=2, checkpointing=DENSE.checkpointing)
TRACED_EP3 = replace(
    TRACED_3, model="stacked", options=(("num_experts", 12),), expert_parallel=3, checkpointing=SPARSE.checkpointing
)
TRACED_EP2 = replace(TRACED_EP3, world_size=4, expert_parallel=2, scheduler="plateau")
TRACED_EP4 = replace(TRACED_EP3, world_size=4, expert_parallel=4)
WORLDS = {"1": TRACED_1, "3": TRACED_3, "3-ep3": TRACED_EP3, "4-ep2": TRACED_EP2, "4-ep4": TRACED_EP4}


def places_of(setup: Setup) -> list[str]:
    """Where a rank of this run can die."""
    together = TOGETHER if setup.world_size > 1 else []
    dense = setup.checkpointing is not None and setup.checkpointing.policy == "dense"
    return [place for place in [*PLACES, *together, *RESUMED, *LAST] if not (dense and place == "replayed")]


def check_deaths(campaigns: Campaigns, setup: Setup, deaths: Sequence[Death], nodes: Nodes | None = None) -> None:
    """Run with ranks that die at places of the code, all of which have to be reached."""
    fit = partial(train_and_die, setup, deaths, no_place if nodes is None else nodes.settle)
    finished = deaths[-1].at.place in LAST
    lives = (run_killed if finished else check_killed)(campaigns, setup, fit=fit, deaths=len(deaths), same_seed=True)
    if finished:
        require_finished(campaigns, setup, lives)
    assert nodes is None or nodes.files() == []


def deaths_at(place: str, ranks: Sequence[int], *, seed: int) -> list[Death]:
    """Each of these ranks dies or stops there, one after another; where training has to have begun, one does before."""
    draw = random.Random(seed)
    found = [
        Death(rank=rank, at=Abort(place=place, after=place in CALLS and draw.random() < 0.3), stops=(seed + i) % 2 == 1)
        for i, rank in enumerate(ranks)
    ]
    before = Death(rank=draw.choice(ranks), at=Abort(place="after_backward", nth=8))
    return [before, *found] if place in RESUMED else found


def matrix() -> Iterator[Any]:
    """Every place of every world, every rank, each of which dies there in one row and stops in another."""
    for world, setup in WORLDS.items():
        ranks = range(setup.world_size)
        for place in places_of(setup):
            for seed in range(2):
                for chosen in [[rank] for rank in ranks] if place in LAST else [[*ranks]]:
                    deaths = deaths_at(place, chosen, seed=seed)
                    yield pytest.param(setup, deaths, id=f"{world}-{place}-{seed}-{chosen[0]}", marks=pytest.mark.soak)


@pytest.mark.parametrize(("setup", "deaths"), [*matrix()])
def test_every_rank_dies_in_every_place(campaigns: Campaigns, setup: Setup, deaths: list[Death]) -> None:
    """By SIGKILL and by SIGSTOP."""
    check_deaths(campaigns, setup, deaths)


def draw_deaths(draw: random.Random, setup: Setup) -> list[Death]:
    """Up to four in a row, in recoveries too, of which the last may be one at the end of an epoch or of training."""
    there = places_of(setup)
    early = [each for each in there if each in {*PHASES, *INSIDE, *STEP, *TOGETHER, *BEGIN} - {*RESUMED}]
    there = [each for each in there if each not in RESUMED]
    found = [draw_death(draw, setup, early) for _ in range(draw.randint(0, 3))]
    if found and found[-1].at.place not in BEGIN:
        there += [each for each in RESUMED if each != "position"]  # between two epochs there is none
    return [*found, draw_death(draw, setup, [each for each in there if each not in {"generation_0", "epoch_start"}])]


def draw_death(draw: random.Random, setup: Setup, places: Sequence[str]) -> Death:
    """One of any rank, at the first or a later time that it comes there; a quarter stop and do not die."""
    place = draw.choice(places)
    often = place in {*PHASES, *INSIDE, *STEP, *TOGETHER} - {"validation", "schedulers", "window", "hand_over"}
    at = Abort(place=place, nth=draw.choice([1, 1, 2, 3]) if often else 1, after=draw.random() < 0.3 and place in CALLS)
    return Death(rank=draw.randrange(setup.world_size), at=at, stops=draw.random() < 0.25)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (0, 1, *range(3, 44)))])
def test_ranks_die_one_after_another(campaigns: Campaigns, folder: Path, seed: int) -> None:
    """Half of the jobs have a node for each rank, one of which loses its memory."""
    draw, setup = random.Random(seed), [*WORLDS.values()][seed % len(WORLDS)]
    deaths = draw_deaths(draw, setup)
    nodes = Nodes(folder, tuple(range(setup.world_size)), dies=deaths[0].rank) if draw.random() < 0.5 else None
    check_deaths(campaigns, setup, deaths, nodes)


@pytest.mark.parametrize("setup", [pytest.param(DENSE_3, marks=pytest.mark.soak), SPARSE_3], ids=["dense", "sparse"])
def test_a_replacement_gets_its_state_from_other_nodes(campaigns: Campaigns, folder: Path, setup: Setup) -> None:
    """The memory of its node is gone with the rank, and storage has nothing but the start."""
    setup, nodes = replace(setup, batches=6), Nodes(folder, (0, 1, 2), dies=1)
    fit = partial(train_with_copies_only, setup, nodes)
    lives = check_killed(campaigns, setup, Kill(phase="forward", step=10, rank=1), fit=fit, same_seed=True)
    assert re.search("from peer", lives[1].log(1)), lives[1].log(1)
    assert "from host" in lives[0].log(0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_ranks_die_at_any_time(campaigns: Campaigns, seed: int) -> None:
    """In recoveries of others too; a rank that has finished meanwhile does not die."""
    draw = random.Random(seed)
    setup = draw.choice([DENSE_3, SPARSE_3, SPARSE_4])
    ranks = [draw.randrange(setup.world_size) for _ in range(draw.randint(1, 4))]
    kills = [Kill(phase="random_time", seconds=draw.uniform(0.0, 0.8), rank=rank) for rank in ranks]
    check_killed(campaigns, setup, *kills, same_seed=True, must_strike=False)


class Counts(Callback):
    """Writes down what this process has whenever training begins in it."""

    def __init__(self, life: Attempt) -> None:
        self._write = JsonLines(life.workdir / f"counts.{life.index}.{life.rank}").write

    @override
    def on_train_start(self, *args: object) -> None:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        has = Belongings.now()
        self._write(
            {
                "threads": has.threads,
                "descriptors": has.descriptors,
                "mib": int(status.partition("VmRSS:")[2].split()[0]) / 1024,
                "left": len(_gloo._kept),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Stormy(Setup):
    """A long run, whose processes count what they have."""

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [*super().callbacks(life), Counts(life)]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("setup", "failures"), [(DENSE_3, 300), (SPARSE_3, 100), (SPARSE_4, 100)], ids=["dense_3", "sparse_3", "sparse_4"]
)
def test_a_storm_of_failures(campaigns: Campaigns, setup: Setup, failures: int) -> None:
    """Failures in one job, every few steps and in recoveries; a quarter of the ranks do not die but stop."""
    stormy = Stormy(**{**vars(setup), "batches": failures * 3 // 2, "validate_every": 20, "epochs": 2})
    storm = Storm(failures=failures)
    lives = check_killed(campaigns, stormy, storm=storm, same_seed=True, timeout=3300.0, must_strike=False)
    logs = [[life._path(rank, "log") for life in lives[:-1]] for rank in range(setup.world_size)]
    began = [sum(log.exists() and log.stat().st_size > 0 for log in own) for own in logs]
    assert sum(began) - setup.world_size > 0.6 * failures, "most ranks were never struck"
    print(f"failures of each rank: {[each - 1 for each in began]}")
    for counts in sorted(lives[0].workdir.glob("counts.*")):
        require_no_growth(counts)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setup", [DENSE_3, SPARSE_3], ids=["dense", "sparse"])
def test_who_stays_does_not_grow(campaigns: Campaigns, setup: Setup) -> None:
    """Threads, descriptors and memory of two ranks while the third dies sixty times."""
    stormy = Stormy(**{**vars(setup), "batches": 120, "validate_every": 20, "epochs": 2})
    storm = Storm(failures=60, victims=(1,), stops=0.0)
    lives = check_killed(campaigns, stormy, storm=storm, same_seed=True, timeout=800.0, must_strike=False)
    for rank in (0, 2):
        assert not (lives[0].workdir / f"counts.1.{rank}").exists(), "another process came in its place"
        assert require_no_growth(lives[0].workdir / f"counts.0.{rank}") > 20


def require_no_growth(counts: Path) -> int:
    """A process has no more than when training had begun in it for the third time; how often it did.

    What the last beginnings all have more of stays; at one of them a file may just be written.
    """
    has = read_lines(counts)
    settled = [each for each in has[3:] if not each["left"]]  # operations that were left are over later
    if len(settled) >= _LAST_BEGINNINGS:
        for kind in ("threads", "descriptors"):
            last: list[Counter[str]] = [Counter(generation[kind]) for generation in settled[-_LAST_BEGINNINGS:]]
            more = functools.reduce(operator.and_, last) - Counter(has[2][kind])
            assert not more, f"{counts.name}: {kind} after {len(has)} beginnings: {more}"
        assert settled[-1]["mib"] < has[2]["mib"] + 20
        print(f"{counts.name}: {len(has)} beginnings, {has[2]['mib']:.0f} to {settled[-1]['mib']:.0f} MiB")
    return len(has)


_LAST_BEGINNINGS = 3


@dataclass(frozen=True, kw_only=True)
class FromFile(Setup):
    """A fit that begins from a file of Lightning's."""

    file: str

    @override
    def fit_options(self, life: Attempt) -> dict[str, Any]:
        return {"ckpt_path": self.file, "weights_only": False}


def test_a_fit_that_begins_from_a_file_goes_on(campaigns: Campaigns) -> None:
    """In place from its first generation on; before, all ranks are started anew."""
    (other,) = campaigns.run(Habit(from_file=True))
    file = str(other.workdir / "begin.ckpt")
    setup = FromFile(file=file, world_size=2, checkpointing=DENSE_3.checkpointing)
    early, late = Kill(phase="epoch_start", step=3, rank=1), Kill(phase="forward", step=7, rank=0, settle=5.0)
    restarted = check_killed(campaigns, setup, early, same_seed=True, restarts=1)
    said = [restarted[life].log(rank) for life, rank in ((0, 0), (1, 1))]
    assert any(f"the fit began from {file}" in each for each in said)  # the others may be ended before they say so
    check_killed(campaigns, setup, late, same_seed=True)


# -- policies that forget


class Settling(Callback):
    """Lets storage finish before every batch: what is taken next does not depend on its speed."""

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        settle(trainer, 10.0)


FORGETS = Checkpointing(policy="partial", k=1, snapshot_k=2, arguments=(("allow_missing_experts", True),))
"""Two experts to memory at every step, one of them to storage."""


@dataclass(frozen=True, kw_only=True)
class Forgetful(Setup):
    """What it takes depends on its steps alone."""

    model: Any = "stacked"
    checkpointing: Checkpointing | None = FORGETS
    batches: int = 10
    epochs: int = 1
    validate_every: int | None = None

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [Settling()]


def ruin(workdir: Path) -> None:
    """No copy is left of one expert, in memory or in storage."""
    lose_memory(workdir)
    ruin_all(workdir)


def end_of(lives: Sequence[AttemptResult]) -> list[dict[str, Any]]:
    return [lives[-1].end(rank) for rank in range(lives[-1].world_size)]


def test_where_an_expert_begins_anew_nobody_goes_on_in_place(campaigns: Campaigns) -> None:
    """Who stayed has trained it."""
    setup = Forgetful(options=(("num_experts", 8),))
    fit = partial(train_in_place, setup, [Abort(place="forward", nth=7)], on_recovery=ruin)
    with pytest.raises(AssertionError, match="processes that stayed have trained them"):
        campaigns.run(setup, fit=fit)


@pytest.mark.soak
@pytest.mark.parametrize("shape", [(2, 1), (4, 2)], ids=["2", "4"])
@pytest.mark.parametrize("on_death", [nothing, ruin], ids=["whole", "missing"])
def test_what_is_forgotten_in_place_is_what_a_whole_restart_forgets(
    campaigns: Campaigns, shape: tuple[int, int], on_death: Callable[[Path], None]
) -> None:
    """The same bits on all ranks. Where an expert begins anew, a whole restart is what follows."""
    world_size, expert_parallel = shape
    setup = Forgetful(options=(("num_experts", 8),), world_size=world_size, expert_parallel=expert_parallel)
    kill = Kill(phase="forward", step=7, rank=1)
    options = {"same_seed": True, "on_death": on_death}
    missing = on_death is ruin
    in_place = run_killed(campaigns, setup, kill, restarts=int(missing), **options)
    restarted = run_killed(campaigns, setup, kill, restarts=1, whole=True, **options)
    for rank, (one, other) in enumerate(zip(end_of(in_place), end_of(restarted), strict=True)):
        assert not differences(one, other), rank
    said = "processes that stayed have trained them" in in_place[1].log(1)
    assert said == missing


# -- without any one of the resets


def _nothing(*args: Any, **options: Any) -> None:
    """Resets nothing."""


def _no_names(*args: object, **options: object) -> list[str]:
    """Restore nothing, and miss nothing."""
    return []


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


MEMENTO, IN_PLACE = "lightning_moe_ckpt.fit.objects._memento", "lightning_moe_ckpt.fit.in_place._survivor"
BOUNDARY = "lightning_moe_ckpt.fit._boundary"
apart = partial(Ablation, module="lightning_moe_ckpt.fit.in_place._survivor", attribute="APART")


def left_alone(*kinds: type) -> tuple[type, ...]:
    """Objects of these types are not reset."""
    return (*_survivor.APART, *kinds)


ABLATIONS: dict[str, Ablation] = {
    "attributes": Ablation(module=MEMENTO, attribute="_restore_space", seen="Error"),
    "module": apart(replacement=left_alone(LightningModule), seen="param/"),
    "parts of the module": apart(replacement=left_alone(ModuleDict, BatchNorm1d, Residual), seen="loss"),
    "metrics": apart(replacement=left_alone(Metric), seen="rows", anew=True, abort=EARLY),
    "callbacks": apart(replacement=left_alone(Begun), seen="batches of another incarnation"),
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
    "epoch metrics": Ablation(module="lightning_moe_ckpt.fit.loggers._metrics", attribute="restore_metrics", seen="metrics"),
    "states of callbacks": Ablation(module=BOUNDARY, attribute="BoundaryState.restore_users", seen="last-v1"),
    "counters": Ablation(
        module="lightning_moe_ckpt.fit._owners", attribute="MovedAttributes.restore", seen="counters"
    ),
    "rates": Ablation(module=BOUNDARY, attribute="BoundaryState.restore_rates", seen="lr "),
    "random state": Ablation(module="lightning_moe_ckpt.fit._data", attribute="restore_rng", seen="OtherData", replacement=_no_names),
    "scale": Ablation(
        module="campaign._training", attribute="MixedPrecision.load_state_dict", seen="precision/", setup=SCALED
    ),
    "what trains": Ablation(module="lightning_moe_ckpt.fit._state", attribute="Trained.restore", seen="requires_grad"),
}  # fmt: skip


SHORT = {"module", "metrics", "buffers"}
"""One ablation of each kind: of what the memento resets in a replay and before there is a generation, and of what a journal
restores. They show what the tests above can see, which changes with those tests only: `make soak` has all."""


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.soak) for name in ABLATIONS]
)
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
