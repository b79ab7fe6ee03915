"""Trainings that audit their steps, with one silent fault each or none, and tables of what audits made of them."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from door import CheckpointCallback
from lightning.pytorch import Trainer
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._faults import Breaking, lines_of
from campaign._pipelined import Pipelined
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Fault, differences, fail_at
from lightning_moe_ckpt.testing._fault import FaultKind, FaultPhase

EVERY_STEP = (("audit_every_n_steps", 1), ("on_fault", "warn"))
_OF_STATE = ("flip_parameter", "flip_moment")
_PHASES: tuple[FaultPhase, ...] = ("batch_end", "batch_start")


@dataclass(frozen=True, kw_only=True)
class Audited(Breaking):
    """A training whose steps are audited; figures of the audits are written beside the records, since the plain run has none."""

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, CheckpointCallback):
                _figures(life.workdir, life.rank).write_text(json.dumps(asdict(callback.report.audit)))
        return super().returned(life, trainer)


@dataclass(frozen=True, kw_only=True)
class AuditedStages(Audited, Pipelined):
    """As `Audited`, in pipeline stages."""


def _figures(workdir: Path, rank: int) -> Path:
    return workdir / f"audits.rank{rank}.json"


def audits_of(life: AttemptResult) -> dict[str, Any]:
    """Figures of a finished training's audits, which are the same on all ranks but for the time."""
    ranks = [json.loads(_figures(life.workdir, rank).read_text()) for rank in range(life.world_size)]
    for each in ranks:
        each.pop("seconds")
    assert all(each == ranks[0] for each in ranks), f"ranks disagree: {ranks}\n{life.log()}"
    return dict(ranks[0])


ALONE = ("2 stages, 2 replicas, EP 2", "1 replica", "1 replica, 2 stages")
"""Places where nobody else holds some of a rank's state, or can do its work."""
SEVERAL = ("3 ranks, DDP", "3 ranks", "4 ranks, DDP")
"""Places where three ranks or more can do the same work, and tell who is wrong."""
PLACES: dict[str, dict[str, Any]] = {
    "3 ranks, DDP": {"world_size": 3, "strategy": "ddp"},
    "3 ranks": {"world_size": 3},
    "4 ranks, DDP": {"world_size": 4, "strategy": "ddp"},
    "4 ranks, EP 2": {"world_size": 4, "expert_parallel": 2, "model": "layers"},
    "2 stages, 2 replicas": {"world_size": 4, "stages": 2},
    "2 stages, 2 replicas, EP 2": {"world_size": 4, "stages": 2, "expert_parallel": 2},
    "2 replicas": {"world_size": 2},
    "1 replica": {"world_size": 1},
    "1 replica, 2 stages": {"world_size": 2, "stages": 2},
}


@dataclass(frozen=True)
class Answer:
    """What audits said of one fault."""

    place: str
    setup: Audited
    number: int
    """Its position among the faults of the training."""
    fault: Fault
    outcome: str
    """The bit that was flipped, as the injector says it; empty if it never came to that."""
    findings: tuple[Mapping[str, Any], ...]
    """Those of the step that the fault struck, and of steps behind it up to the next fault."""

    def __str__(self) -> str:
        said = [each["text"] for each in self.findings]
        return f"{self.place}, {type(self.setup).__name__}({self.setup.model}, {self.setup.precision}): {self.fault}, {self.outcome}: {said}"

    @property
    def exact(self) -> bool:
        """Whether every finding names the rank that was at fault, and no other."""
        return bool(self.findings) and all(each["ranks"] == [self.fault.rank] for each in self.findings)

    @property
    def among(self) -> bool:
        """Whether every finding names the rank that was at fault."""
        return bool(self.findings) and all(self.fault.rank in each["ranks"] for each in self.findings)

    @property
    def in_time(self) -> bool:
        """Whether the first audit behind the fault has found it."""
        return bool(self.findings) and self.findings[0]["step"] == _first_seen(self.fault)


def _first_seen(fault: Fault) -> int:
    """The step by which the first audit behind a fault would name a finding: of a state, the boundary behind which it is looked at."""
    return fault.step + (fault.kind not in _OF_STATE)


def draw_setup(place: str, number: int, *, batches: int = 18) -> Audited:
    """A training in a place, by a number."""
    rng = random.Random(f"audited {place} {number}")
    checkpointing = [
        Checkpointing(policy="dense", every_n_steps=rng.randint(1, 3), arguments=EVERY_STEP),
        Checkpointing(policy="sparse", window=rng.randint(1, 3), arguments=EVERY_STEP),
        Checkpointing(policy="differential", every_n_steps=4, batch=2, arguments=EVERY_STEP),
    ][number % 3]
    options: dict[str, Any] = {
        "batches": batches,
        "epochs": 1,
        "precision": rng.choice(["32-true", "32-true", "bf16-mixed"]),
        "optimizer": rng.choice(["adamw", "adamw", "sgd"]),
        "workers": rng.choice([0, 0, 0, 1]),
        "validate_every": rng.choice([None, 3]),
        "epoch_metrics": rng.choice([False, True]),
        "checkpointing": checkpointing,
    }
    options |= PLACES[place]
    if "stages" in options:
        return AuditedStages(**{**options, "epoch_metrics": False})
    return Audited(**{"model": rng.choice(["lists", "mixtral", "stacked", "tied", "batch_norm"]), **options})


def draw(place: str, number: int) -> Audited:
    """A training with six faults: two gradients and two activations, then wrong products in two steps, at last what stays wrong.

    The first time that a step computes something is in another rank's place; what is passed over then is the step that counts.
    """
    rng, setup = random.Random(f"faults {place} {number}"), draw_setup(place, number)
    kinds: list[FaultKind] = ["flip_gradient", "flip_activation", "flip_gradient", "flip_activation"]
    once = getattr(setup, "micro_batches", 1)
    faults = [
        fail_at(rng.randrange(setup.world_size), 3 + 2 * at, rng.choice(_PHASES), kind=kind, skip=rng.choice([0, once]))
        for at, kind in enumerate(kinds)
    ]
    wrong = fail_at(rng.randrange(setup.world_size), 11, rng.choice(_PHASES), kind="wrong_products", steps=2)
    state: FaultKind = "flip_moment" if number % 2 else "flip_parameter"
    lasting = fail_at(rng.randrange(setup.world_size), 15, rng.choice(_PHASES), kind=state)
    return replace(setup, faults=(*faults, wrong, lasting))


def inject(campaigns: Campaigns, places: Sequence[str], numbers: Sequence[int], **options: Any) -> list[Answer]:
    """Run a drawn training, with options, in each place for each number, and return what audits said of each fault."""
    pairs = [(place, replace(draw(place, number), **options)) for number in numbers for place in places]
    lives = campaigns.run_each([setup for _, setup in pairs], timeout=300.0)
    return [answer for pair, life in zip(pairs, lives, strict=True) for answer in _answers(*pair, life)]


def _answers(place: str, setup: Audited, life: AttemptResult) -> Iterator[Answer]:
    ends = {line["name"]: line for event in ("struck", "over") for line in lines_of(life.workdir, event)}
    found = audits_of(life)["findings"]
    steps = [*map(_first_seen, setup.faults), setup.steps + 1]
    assert all(each["step"] >= steps[0] for each in found), f"a false alarm: {found}"
    for index, fault in enumerate(setup.faults):
        own = tuple(each for each in found if steps[index] <= each["step"] < steps[index + 1])
        line = ends.get(f"script {index}: {fault.kind} {fault.rank} {fault.step} {fault.phase}", {})
        outcome = str(line.get("outcome") or f"it hit {line.get('calls', 0)} calls")
        yield Answer(place, setup, index, fault, outcome, own)


def changes(campaigns: Campaigns, answers: Sequence[Answer]) -> list[bool]:
    """Whether the end of each fault's training would be another without it; earlier faults stay, since they have moved the weights."""
    with_it = [replace(each.setup, faults=each.setup.faults[: each.number + 1]) for each in answers]
    without = [replace(each.setup, faults=each.setup.faults[: each.number]) for each in answers]
    lives = campaigns.run_each([*with_it, *without], timeout=300.0)
    pairs = zip(lives[: len(answers)], lives[len(answers) :], strict=True)
    return [any(differences(a.end(rank), b.end(rank)) for rank in range(a.world_size)) for a, b in pairs]


def table(answers: Sequence[Answer]) -> str:
    """One line per place and kind: injected, found, found by the audit of that step, named alone, named among others."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each in answers:
        row = counts[each.place, each.fault.kind]
        row.update(injected=1, found=bool(each.findings), in_time=each.in_time, exact=each.exact, among=each.among)
    columns = ("injected", "found", "in_time", "exact", "among")
    lines = [f"{'place':28}{'kind':18}" + "".join(f"{column:>9}" for column in columns)]
    for (place, kind), row in [*sorted(counts.items()), (("all", ""), sum(counts.values(), Counter()))]:
        lines.append(f"{place:28}{kind:18}" + "".join(f"{row[column]:9}" for column in columns))
    return "\n".join(lines)
