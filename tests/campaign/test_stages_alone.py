"""A rank of a pipeline stage dies, and its stage recovers alone: the others keep process, state and step."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import cycle, islice, pairwise
from typing import Any

import pytest
import torch
from door import JsonLines, bits, read_lines
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import Self, override

from campaign._campaign import Campaigns
from campaign._data import VOCABULARY
from campaign._in_place import CALLS, Abort, Death, no_place, train_and_die
from campaign._pipelined import Pipelined, PipelinedModule
from campaign._training import Checkpointing, Module
from campaign.test_in_place import check_killed
from lightning_moe_ckpt.callbacks import ExpertLoadMonitor
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.parallel import GradientReducer
from lightning_moe_ckpt.parallel._upstream import UpstreamLog
from lightning_moe_ckpt.testing import Attempt, AttemptResult

SPARSE = Checkpointing(policy="sparse", window=3, order="popularity")
DENSE = Checkpointing(policy="dense", every_n_steps=2)


class CountedModule(PipelinedModule):
    """Writes down every step that the optimizer takes; its loss depends on how often it was asked for, and is averaged over epochs.

    It depends too on a generator, on a list and a tensor that are empty between steps, and on many lists that are.
    """

    asked = 0

    def __init__(self, setup: Counted, life: Attempt) -> None:
        super().__init__(setup, life)
        self._generator, self._parts = torch.Generator().manual_seed(1), list[int]()
        self._sum = torch.zeros(())
        self._many: dict[int, list[int]] = {number: [] for number in range(setup.lists)}

    @override
    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().stage_loss(output, target)
        if self.training:
            self.log("mean_loss", loss, on_step=False, on_epoch=True, batch_size=len(target))
        return loss

    @override
    def stage_auxiliary_loss(self) -> Tensor | None:
        found = super().stage_auxiliary_loss()
        self.asked += self.training
        if found is None or not self.training:
            return found
        self._parts.append(1)
        self._many[len(self._parts)].append(1)
        self._sum += torch.rand((), generator=self._generator)
        return found * (
            1 + 1e-2 * self.asked + 1e-1 * len(self._parts) + self._sum + sum(map(len, self._many.values()))
        )

    @override
    def on_train_batch_end(self, *args: object) -> None:
        super().on_train_batch_end(*args)
        self._parts.clear()
        self._sum.zero_()
        for each in self._many.values():
            each.clear()

    @override
    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        optimizer: torch.optim.Optimizer = found if isinstance(found, torch.optim.Optimizer) else found["optimizer"]
        write = JsonLines(self._life.workdir / f"stepped.{self._life.index}.{self._life.rank}").write
        optimizer.register_step_post_hook(lambda *_: write({"step": self.trainer.global_step, "pid": os.getpid()}))
        return found


@dataclass(frozen=True, kw_only=True)
class Counted(Pipelined):
    """A run in stages, of which it is known how often each rank has taken which step.

    Between steps there is nothing else: behind its last step a rank would come to a validation, or to the end of an epoch.
    """

    batches: int = 12
    epochs: int = 1
    validate_every: int | None = None
    checkpointing: Checkpointing | None = SPARSE
    lists: int = 20

    @override
    def make_module(self, life: Attempt) -> Module:
        return CountedModule(self, life)

    @override
    def fault_free(self) -> Self:
        return replace(super().fault_free(), lists=Counted.lists)

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        mean = trainer.callback_metrics["mean_loss"]
        return {**super().returned(life, trainer), "mean": bits(mean)}


TOPOLOGIES = {
    "2x1x1": Counted(world_size=2),
    "2x2x1": Counted(world_size=4),
    "2x1x2": Counted(world_size=4, expert_parallel=2),
    "4x1x1": Counted(world_size=4, stages=4, micro_batches=4),
}
"""Stages, replicas of each, and ranks that share experts."""
LARGE = {
    "2x2x2": Counted(world_size=8, expert_parallel=2),
    "2x4x1": Counted(world_size=8),
    "4x2x1": Counted(world_size=8, stages=4, micro_batches=4),
    "4x1x2": Counted(world_size=8, stages=4, micro_batches=4, expert_parallel=2),
}
THREE = {
    "3x2x1": Counted(world_size=6, stages=3, micro_batches=4, schedule="gpipe"),
    "3x1x2": Counted(world_size=6, stages=3, micro_batches=4, expert_parallel=2),
}
TWO, FOUR = TOPOLOGIES["2x1x1"], TOPOLOGIES["4x1x1"]
IN_ATTEMPT = ["batch_start", "forward", "in_forward", "in_backward", "after_backward", "agree", "clip"]
IN_ATTEMPT += ["before_optimizer_step", "commit"]
BEHIND = ["commit>", "in_optimizer", "batch_end", "after_batch_end", "schedulers>"]
BEHIND += ["boundary", "boundary>", "seal", "seal>", "reconcile>"]
PLACES = [*IN_ATTEMPT, *BEHIND]
"""Where a rank dies while other stages are inside a step, or come to the next one; `name>` is behind a call."""
ALL_PLACES = [*PLACES, "capture", "optimizer>", "reduce", "capture>"]
"""With those that random sequences are not drawn from."""
OFTEN = {"in_optimizer": 7, "reduce": 2}
"""Places that come several times in a step: once for each parameter, or bucket."""


def has_place(setup: Counted, place: str) -> bool:
    """Whether ranks of a run come there: a stage of one rank has nothing to reduce."""
    if place == "in_optimizer":
        return setup.optimizer in {"adam", "adamw"}
    return place != "reduce" or setup.world_size > setup.stages


def places_of(setup: Counted, places: Sequence[str]) -> list[str]:
    """Those that ranks of a run come to."""
    return [place for place in places if has_place(setup, place)]


def death(place: str, rank: int, *, nth: int = 3) -> Death:
    """Of a rank at a place."""
    name, after = place.removesuffix(">"), place.endswith(">")
    assert not after or name in CALLS
    return Death(rank=rank, at=Abort(place=name, nth=nth, after=after))


def chain(places: Sequence[str], ranks: Sequence[int]) -> list[Death]:
    """One after another, the first when there is a generation; some die again while they repeat steps."""
    pairs = enumerate(zip(places, ranks, strict=True))
    return [death(place, rank, nth=(3 if index else 6) * OFTEN.get(place, 1)) for index, (place, rank) in pairs]


def check(
    campaigns: Campaigns,
    setup: Counted,
    deaths: Sequence[Death],
    *,
    fit: Callable[..., Any] | None = None,
    timeout: float = 60.0,
) -> list[AttemptResult]:
    """Run with ranks that die one after another, and require the end of the fault-free run on every rank."""
    fit = fit or partial(train_and_die, setup, deaths, no_place)
    ends = sum(len(each.ends) for each in deaths)
    lives = check_killed(campaigns, setup, fit=fit, deaths=ends, same_seed=True, timeout=timeout)
    require_counted(lives, setup, deaths)
    return lives


def said(lives: Sequence[AttemptResult], rank: int) -> str:
    """What all processes of a rank have said, in their order."""
    return "".join(each.log(rank) for each in lives[:-1] if each._path(rank, "log").exists())


def decisions(lives: Sequence[AttemptResult]) -> list[str]:
    """What followed from each failure: stages that recovered alone, or why everybody went on in place."""
    found = re.findall(r"stages (\[.*\]) recover alone|everybody goes on in place: (.*)", said(lives, 0))
    return [alone or everybody for alone, everybody in found]


def taken(lives: Sequence[AttemptResult], rank: int) -> list[dict[str, Any]]:
    """Steps that the optimizers of all processes of a rank have taken, in their order."""
    paths = [lives[0].workdir / f"stepped.{each.index}.{rank}" for each in lives[:-1]]
    return [line for path in paths if path.exists() for line in read_lines(path)]


def require_counted(lives: Sequence[AttemptResult], setup: Counted, deaths: Sequence[Death]) -> None:
    """Who did not die is the same process, and a stage takes steps again only where one of its ranks has died, or all go back."""
    size, ended = setup.world_size // setup.stages, Counter(rank for each in deaths for rank, _ in each.ends)
    went_back = [
        json.loads(decision) if decision.startswith("[") else [*range(setup.stages)] for decision in decisions(lives)
    ]
    if any(each.shots for each in deaths):  # rank 0 may be shot before it says what all have just decided
        went_back += [[*range(setup.stages)]] * ended[0]
    for rank in range(setup.world_size):
        lines = taken(lives, rank)
        assert len({line["pid"] for line in lines}) <= 1 + ended[rank]
        steps = [line["step"] for line in lines]
        back = sum(later <= earlier for earlier, later in pairwise(steps))
        own = sum(rank // size in each for each in went_back)
        assert back <= own, f"rank {rank} took {steps}"
        if not own:
            assert steps == sorted(set(steps)), f"rank {rank} took {steps}"
            assert steps == list(range(setup.steps)) or setup.precision == "16-mixed"  # whose scaler leaves some out
            assert len(re.findall(r"goes on in step", said(lives, rank))) >= 1


def check_alone(campaigns: Campaigns, setup: Counted, deaths: Sequence[Death]) -> list[AttemptResult]:
    """Every failure is one that the stage of the dead recovers from alone; the log says so."""
    lives = check(campaigns, setup, deaths)
    size = setup.world_size // setup.stages
    assert decisions(lives) == [f"[{each.rank // size}]" for each in deaths]
    for each in deaths:
        stage = each.rank // size
        assert re.search(rf"stage {stage} goes from step \d+ to step \d+ alone", said(lives, each.rank))
        others = [rank for rank in range(setup.world_size) if rank // size != stage]
        assert all(f"while stages [{stage}] repeat theirs" in said(lives, rank) for rank in others)
    return lives


class Draws(Callback):
    """Holds a generator, and draws and counts inside a step."""

    def __init__(self) -> None:
        self.generator, self.calls = torch.Generator().manual_seed(2), 0

    @override
    def on_before_optimizer_step(self, *_: object) -> None:
        self.calls += int(torch.randint(3, (), generator=self.generator))


class Edits(CountedModule):
    """Moves what the loss is computed from, by random numbers of a callback, and takes what a batch has out of it."""

    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        targets = batch.pop()
        (draws,) = (callback for callback in callbacks_of(self.trainer) if isinstance(callback, Draws))
        targets.add_(torch.randint_like(targets, 3, generator=draws.generator) + draws.calls).remainder_(VOCABULARY)
        return batch.pop(), targets

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return list(batch)


@dataclass(frozen=True, kw_only=True)
class Editing(Counted):
    """A run whose steps leave nothing of a batch as it was."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return Edits(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [*super().callbacks(life), Draws(), ExpertLoadMonitor(every_n_steps=2)]


FOUR_RANKS = {
    "2x2x1, shard_optimizer": {"seal": 3, "reduce": 3},
    "2x1x2": {"in_backward": 0, "commit>": 3},
    "4x1x1, recomputes": {"forward": 1, "commit": 3},
}
"""Places of dying, and the rank, that need several ranks in a stage, or are spread over those topologies; two ranks are cheaper."""


def rows() -> list[Any]:
    """Every place once beside one of another stage, spread over ranks and topologies, which have habits of their own.

    An ordinary run has every other place of those that two ranks have; a soak has each, and below each in every topology.
    """
    rest = [place for place in ALL_PLACES if all(place not in part for part in FOUR_RANKS.values())]
    found = []
    for places, name, marks in ((rest[::2], "some", []), (rest, "all", [pytest.mark.soak])):
        editing, deaths = (
            Editing(world_size=2, batches=5 + 3 * len(places)),
            chain(places, ranks_of(len(places), (1, 0))),
        )
        found.append(pytest.param(editing, deaths, id=f"2x1x1, edits, {name}", marks=marks))
    for row, deadly in FOUR_RANKS.items():
        name, _, option = row.partition(", ")
        setup, more = replace(TOPOLOGIES[name], lists=200), ((option, True),) if option else ()
        sharded = option == "shard_optimizer"
        setup = replace(setup, strategy_options=more) if sharded else replace(setup, options=more)
        found.append(pytest.param(setup, chain([*deadly], [*deadly.values()]), id=row))
    return found


def ranks_of(count: int, ranks: Sequence[int]) -> list[int]:
    return [*islice(cycle(ranks), count)]


@pytest.mark.parametrize(("setup", "deaths"), rows())
def test_a_stage_recovers_alone(campaigns: Campaigns, setup: Counted, deaths: list[Death]) -> None:
    """The end is that of the fault-free run in every bit of every rank; no other stage takes any step again.

    A step that is done again begins with the batch as it came. Forwards and backwards alternate as they did: averages of
    normalisation depend on it where statistics are computed again, and no other stage sees them.
    """
    check_alone(campaigns, setup, deaths)


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[tuple[str, str]]]:
    """How many recoveries of one stage alone were exact, by topology and place."""
    found = Counter[tuple[str, str]]()
    yield found
    print("\nrecoveries of one stage alone", *(f"{place:<24}" for place in TOPOLOGIES))
    for place in ALL_PLACES:
        print(f"{place:<29}", *(f"{found[name, place]:<24}" for name in TOPOLOGIES))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("place", "name"),
    [(place, name) for place in ALL_PLACES for name, setup in TOPOLOGIES.items() if has_place(setup, place)],
)
def test_a_stage_recovers_alone_from_everywhere(
    campaigns: Campaigns, tally: Counter[tuple[str, str]], name: str, place: str
) -> None:
    """Each rank dies there, one after another."""
    ranks = range(TOPOLOGIES[name].world_size)
    check_alone(campaigns, replace(TOPOLOGIES[name], batches=18), chain([place] * len(ranks), ranks))
    tally[name, place] += len(ranks)


def drawn_setup(draw: random.Random, topologies: Mapping[str, Counted] = TOPOLOGIES) -> Counted:
    """A run of two epochs."""
    validate = draw.choice([None, 3, 4])
    setup = replace(
        draw.choice([*topologies.values()]),
        batches=14,
        epochs=2,
        validate_every=validate,
        schedule=draw.choice(["1f1b", "gpipe"]),
        precision=draw.choice(["32-true", "bf16-mixed", "16-mixed"]),
        scheduler=draw.choice(["cosine", "plateau" if validate else "epoch"]),
        checkpointing=draw.choice([SPARSE, SPARSE, DENSE]),
    )
    return further(random.Random(repr(draw.getstate())), setup)


def further(draw: random.Random, setup: Counted) -> Counted:
    """With more that two of three runs may have, drawn apart, so that a number means the same run but for this."""
    changes: dict[str, Any] = {
        "clip": draw.choice([0.5, None]),
        "optimizer": draw.choice(["adamw", "adam", "sgd", "adamw_foreach", "adamw_fused"]),
        "averaged": draw.choice([None, None, "ema"]),
        "loader": draw.choice(["plain", "plain", "stateful"]),
        "workers": draw.choice([0, 0, 0, 1]),
        "micro_batches": 4 if setup.stages > 2 else draw.choice([2, 4]),
        "bucket_nbytes": draw.choice([(2**25,), (2**12,)]),
    }
    if changes["optimizer"] == "adamw_fused" and setup.precision != "32-true":  # Lightning does not clip it then
        changes["optimizer"] = "adamw"
    stored: dict[str, Any] = {
        "every_n_steps": draw.randint(1, 3),
        "window": draw.choice([1, 2, 4, 5, "auto"]),
        "order": draw.choice(["popularity", "fixed", "back_to_front"]),
        "target": draw.choice([None, None, 0.001, 0.03]),
        "at_least": draw.choice([0.05, 600.0]),
    }
    if stored["window"] == "auto":
        stored["budget_nbytes"] = draw.choice([None, 12_000, 20_000, 40_000])
    changes["checkpointing"] = replace(draw.choice([DENSE, SPARSE, SPARSE]), **stored)
    return replace(setup, **changes) if draw.random() < 2 / 3 else setup


def die_one_after_another(campaigns: Campaigns, draw: random.Random, setup: Counted) -> None:
    """Anywhere, in recoveries of others too; a quarter stop and do not die."""
    later = [*PLACES, "open", "join_tiers"]
    deaths = []
    for index in range(draw.randint(1, 4)):
        place, most = draw.choice(places_of(setup, later if index else PLACES)), 3 if index else 9
        once = place in {"open", "join_tiers"}
        nth = 1 if once else draw.randint(1, most) * OFTEN.get(place, 1)
        deaths.append(replace(death(place, draw.randrange(setup.world_size), nth=nth), stops=draw.random() < 0.25))
    lives = check(campaigns, setup, deaths, timeout=30.0 * max(2, setup.world_size))
    print(f"{', '.join(f'{each.rank} {each.at.place}' for each in deaths)}: {decisions(lives)}")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_ranks_die_one_after_another(campaigns: Campaigns, seed: int) -> None:
    """However a run is spread, trained and stored."""
    draw = random.Random(f"alone {seed}")
    die_one_after_another(campaigns, draw, drawn_setup(draw))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(40))
def test_ranks_of_large_stages_die(campaigns: Campaigns, seed: int) -> None:
    """Replicas, ranks that share experts, and both, with eight processes; half of those without a scaler share the optimizer's state."""
    draw = random.Random(f"large {seed}")
    setup = drawn_setup(draw, LARGE)
    if draw.random() < 0.5 and setup.precision != "16-mixed":
        setup = replace(setup, strategy_options=(("shard_optimizer", True),))
    die_one_after_another(campaigns, draw, setup)


VALIDATED = replace(TWO, batches=8, epochs=2, validate_every=3)
"""A stage also repeats what it did in validations, and at the end of an epoch."""


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(
            replace(VALIDATED, precision="16-mixed", overflow_steps=(5, 9), schedule="gpipe", scheduler="plateau"),
            marks=pytest.mark.soak,
        ),
        pytest.param(replace(VALIDATED, checkpointing=DENSE, averaged="ema"), marks=pytest.mark.soak),
        pytest.param(replace(VALIDATED, precision="bf16-mixed", micro_batches=4), marks=pytest.mark.soak),
        pytest.param(
            replace(VALIDATED, world_size=4, precision="16-mixed", overflow_steps=(4, 8)), marks=pytest.mark.soak
        ),
    ],
    ids=["fp16", "dense", "bf16", "fp16-2x2x1"],
)
def test_other_precisions_and_policies(campaigns: Campaigns, setup: Counted) -> None:
    """Scales that change, and steps that are left out on all ranks; an ordinary run has them beside files."""
    size = setup.world_size // 2
    check_alone(campaigns, setup, chain(["after_backward", "clip", "before_optimizer_step"], [size, 0, size]))


RECOMPUTING = replace(TWO, batches=16, micro_batches=4, options=(("recomputes", True),))


@pytest.mark.parametrize(
    ("setup", "ranks"),
    [
        pytest.param(RECOMPUTING, [0], marks=pytest.mark.soak),
        pytest.param(replace(RECOMPUTING, schedule="gpipe"), [0, 1], marks=pytest.mark.soak),
        pytest.param(replace(RECOMPUTING, world_size=4, stages=4), [1, 0, 2], marks=pytest.mark.soak),
    ],
    ids=["1f1b", "gpipe", "4x1x1"],
)
def test_backwards_that_compute_statistics_again(campaigns: Campaigns, setup: Counted, ranks: list[int]) -> None:
    """Forwards and backwards alternate as they did: averages of normalisation depend on it, and no other stage sees them."""
    check_alone(campaigns, setup, chain(["forward"] * len(ranks), ranks))


ELSEWHERE = "other stages were not inside a step"


@pytest.mark.parametrize(
    ("place", "nth", "why"),
    [("validation", 2, ELSEWHERE), ("forward", 1, "there is no generation yet")],
)
def test_elsewhere_everybody_recovers(campaigns: Campaigns, place: str, nth: int, why: str) -> None:
    """In place, from the newest generation or the start."""
    lives = check(campaigns, VALIDATED, [death(place, 1, nth=nth)])
    assert decisions(lives) == [why]


OFF = "this run does not let a stage recover alone"


class Clamps(CountedModule):
    """Moves a weight inside a step, and leaves no other trace of that."""

    @override
    def stage_auxiliary_loss(self) -> Tensor | None:
        next(self.parameters()).data.clamp_(-2, 2)
        return super().stage_auxiliary_loss()


@dataclass(frozen=True, kw_only=True)
class Clamping(Counted):
    """A run with weights that a step clamps."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return Clamps(self, life)


@pytest.mark.parametrize(
    ("setup", "why", "warns"),
    [
        (replace(TWO, strategy_options=(("localized_recovery", False),)), [], None),
        pytest.param(
            Editing(world_size=2, strategy_options=(("localized_recovery", None),)),
            [OFF],
            None,
            marks=pytest.mark.soak,  # `strategy/test_alone.py` has the reasons
        ),
        (
            replace(TWO, strategy_options=(("upstream_log_nbytes", "1KiB"),)),
            [OFF],
            "more than `MoEStrategy(upstream_log_nbytes=1024)`",
        ),
        pytest.param(
            replace(TWO, lists=1001),
            [OFF],
            "the module has a container of more than 1000 objects",
            marks=pytest.mark.soak,
        ),
        (
            replace(TWO, options=(("max_norm", 0.5),)),
            [OFF],
            "a step changes `stage.embed.weight` before the optimizer does",
        ),
        pytest.param(Clamping(world_size=2), [OFF], "a step uses `.data` of weights", marks=pytest.mark.soak),
    ],
    ids=["off", "hooks", "too little memory", "too many objects", "weights that change", "data"],
)
def test_it_can_be_turned_off(campaigns: Campaigns, setup: Counted, why: list[str], warns: str | None) -> None:
    """By the user, or since memory is not enough, or too much would have to be put back in every step, which is said."""
    deaths = [death("forward", 1, nth=7)]
    lives = check_killed(
        campaigns, setup, fit=partial(train_and_die, setup, deaths, no_place), deaths=1, same_seed=True
    )
    assert decisions(lives) == why
    assert warns is None or warns in said(lives, 0)
    assert "goes on in step" not in said(lives, 0)
    assert lives[0].steps(0) != [*range(1, TWO.steps + 1)], "rank 0 did not go back"


class LateModule(CountedModule):
    """Changes a large buffer from its seventh step on."""

    late: Tensor

    @override
    def configure_stage(self, *args: Any, **options: Any) -> Any:
        found = super().configure_stage(*args, **options)
        self.register_buffer("late", torch.zeros(2**15))
        return found

    @override
    def stage_auxiliary_loss(self) -> Tensor | None:
        found = super().stage_auxiliary_loss()
        if self.training and self.trainer.global_step >= 6:
            self.late += 1
        return None if found is None else found * (1 + 1e-2 * float(self.late[0]))


@dataclass(frozen=True, kw_only=True)
class Late(Counted):
    """A run in which an attempt changes what no attempt has changed before."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return LateModule(self, life)


def test_what_an_attempt_changes_for_the_first_time_sends_all_back_once(campaigns: Campaigns) -> None:
    """There is a copy of it when a rank dies again, and its stage recovers alone."""
    setup, deaths = Late(world_size=2), [death("clip", 1, nth=7), death("clip", 1, nth=6)]
    fit = partial(train_and_die, setup, deaths, no_place)
    lives = check_killed(campaigns, setup, fit=fit, deaths=2, same_seed=True)
    assert decisions(lives) == ["a step had changed what a rank has no copy of", "[1]"]
    assert "a step changes a tensor of shape (32768,), of which there is no copy" in said(lives, 0)


@dataclass(frozen=True)
class Losing:
    """A rank that never hears that a step is taken, while another dies right behind it, and the rest go on."""

    setup: Counted
    deaths: Sequence[Death]
    rank: int
    nth: int

    def __call__(self, life: Attempt) -> Mapping[str, Any]:
        if life.rank == self.rank and life.index == 0:
            exchange, asked = GradientReducer.exchange_flags, [0]

            def exchange_flags(reducer: GradientReducer) -> dict[str, int]:
                found = exchange(reducer)
                asked[0] += 1
                supervised = Supervised.from_environment()
                if asked[0] == self.nth and supervised is not None:
                    supervised.confirm(10.0)
                    raise RuntimeError("gloo/ lost what the others know")
                return found

            GradientReducer.exchange_flags = exchange_flags  # type: ignore[assignment, method-assign]
        return train_and_die(self.setup, self.deaths, no_place, life)


@pytest.mark.parametrize("name", ["4x1x1", pytest.param("2x2x1", marks=pytest.mark.soak)])
def test_a_step_that_one_rank_knows_to_be_taken_is_taken_by_all(campaigns: Campaigns, name: str) -> None:
    """Rolled forward from the gradients that each has, not done again."""
    setup, deaths = TOPOLOGIES[name], [death("commit>", 3, nth=9)]
    lives = check(campaigns, setup, deaths, fit=Losing(setup, deaths, rank=0, nth=9))
    assert decisions(lives) == [f"[{setup.stages - 1}]"]
    assert "step 8 is taken: all ranks had come to its commit" in said(lives, 0)


# -- steps that are not the same again


class WaveringModule(CountedModule):
    """Computes otherwise on one rank while its stage repeats steps, or asks all what it had not asked."""

    @override
    def stage_auxiliary_loss(self) -> Tensor | None:
        found, setup = super().stage_auxiliary_loss(), self._setup
        assert isinstance(setup, Wavering)
        strategy: Any = self.trainer.strategy
        wavers = strategy.upstream.apart and self.global_rank % 2
        if wavers and setup.asks:
            strategy.broadcast("the others of the stage wait in a reduction")
        return None if found is None else found * (1 + wavers)


@dataclass(frozen=True, kw_only=True)
class Wavering(Counted):
    """A run of which one stage cannot repeat steps."""

    asks: bool = False

    @override
    def make_module(self, life: Attempt) -> Module:
        return WaveringModule(self, life)


@pytest.mark.parametrize(
    ("size", "rank", "asks"),
    [
        (2, 2, True),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in [(2, 2, False), (2, 1, False), (1, 1, False)]),
    ],
)
def test_a_stage_that_does_not_repeat_its_steps_exactly_is_found_out(
    campaigns: Campaigns, size: int, rank: int, asks: bool
) -> None:
    """By one of its ranks, which calls it off; everybody goes on in place, and so when that one is replaced, to the same end."""
    setup, odd = Wavering(world_size=2 * size, asks=asks), rank | 1
    nobody = Death(rank=0, at=Abort(place="nowhere"), survives=True)  # in the incarnation that is called off
    deaths = [death("forward", rank, nth=6), nobody, death("forward", odd, nth=4)]
    fit = partial(train_and_die, setup, deaths, no_place)
    lives = check_killed(campaigns, setup, fit=fit, deaths=2, same_seed=True)
    assert decisions(lives) == [f"[{rank // size}]", *["this run does not let a stage recover alone"] * 2]
    assert "this stage does not come to the step that failed as it did before" in said(lives, odd)
    assert f"rank {odd} does not repeat its steps exactly: " in said(lives, 0)


# -- an attempt leaves no trace


@dataclass(frozen=True)
class Without:
    """Trains without something."""

    setup: Counted
    deaths: Sequence[Death]
    module: str
    attribute: str

    def __call__(self, life: Attempt) -> Mapping[str, Any]:
        *path, name = self.attribute.split(".")
        instead: Any = () if name == "_unzeroed" else _nothing
        setattr(reduce(getattr, path, importlib.import_module(self.module)), name, lambda *_, **__: instead)
        return train_and_die(self.setup, self.deaths, no_place, life)


def _nothing(*_: object) -> None:
    """Puts nothing back."""


UNDO = "lightning_moe_ckpt.fit.in_place._undo"
ABLATIONS = {
    "everything": (UNDO, "StepUndo.undo", "loss|buffer"),
    "random state": ("lightning_moe_ckpt.fit.objects._memento", "restore_rng", "loss"),
    "attributes, buffers": ("lightning_moe_ckpt.fit.objects._memento", "Memento.restore", "loss|buffer"),
    "results": (UNDO, "hold", "mean"),
    "gradients": (UNDO, "_unzeroed", "loss"),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", ABLATIONS)
def test_without_putting_back_what_an_attempt_has_changed_the_end_is_another(campaigns: Campaigns, name: str) -> None:
    """Its control are the tests above."""
    module, attribute, seen = ABLATIONS[name]
    deaths, setup = [death("after_backward", 1, nth=9)], TWO
    if name == "gradients":  # of parameters of which an optimizer has pieces
        deaths = [death("reduce", 3, nth=9)]
        setup = replace(TOPOLOGIES["2x2x1"], strategy_options=(("shard_optimizer", True),))
    with pytest.raises(AssertionError, match=seen):
        check(campaigns, setup, deaths, fit=Without(setup, deaths, module, attribute))


# -- memory


class Sizes(Callback):
    """Writes down how large the log is after each step, and is said to be at most."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        upstream: UpstreamLog = trainer.strategy.upstream  # type: ignore[attr-defined]
        self._write({"is": upstream.nbytes, "expected": upstream.expected_nbytes, "step": upstream.step_nbytes})


@dataclass(frozen=True, kw_only=True)
class Sized(Counted):
    """A long run that tells its sizes."""

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [*super().callbacks(life), Sizes(JsonLines(life.workdir / f"sizes.{life.rank}").write)]


@pytest.mark.parametrize(
    "setup",
    [
        Sized(world_size=2, batches=40),
        pytest.param(Sized(world_size=2, batches=300), marks=pytest.mark.soak),
        pytest.param(Sized(world_size=2, batches=300, checkpointing=DENSE), marks=pytest.mark.soak),
    ],
    ids=["40", "300", "dense"],
)
def test_the_log_takes_what_was_said(campaigns: Campaigns, setup: Sized) -> None:
    """Within a twentieth, again and again, and never more."""
    lives = check_killed(campaigns, setup, same_seed=True)
    for rank in range(setup.world_size):
        assert "memory: upstream log" in said(lives, rank)
        sizes = [line for line in read_lines(lives[0].workdir / f"sizes.{rank}") if line["expected"]]
        assert len(sizes) > 0.8 * setup.steps
        print(sorted(Counter(line["is"] // line["step"] for line in sizes).items()), sizes[-1])
        assert 0.95 <= max(line["is"] for line in sizes) / sizes[-1]["expected"] <= 1.05
