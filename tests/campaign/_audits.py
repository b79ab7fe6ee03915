"""Trainings that audit their steps, with one silent fault each or none, and tables of what audits made of them."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from door import CheckpointCallback
from lightning.pytorch import Trainer
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._faults import Breaking, lines_of
from campaign._pipelined import Pipelined
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Fault, differences, fail_at
from lightning_moe_ckpt.testing._fault import FaultKind, FaultPhase

EVERY_STEP = (("audit_every_n_steps", 1), ("on_fault", "warn"))
FIRST_AUDITED = 2
"""Value of `trainer.global_step` in the first step that an audit can find a fault in: one is watched before, one tried."""
KINDS: tuple[FaultKind, ...] = (
    "flip_parameter",
    "flip_moment",
    "flip_gradient",
    "flip_activation",
    "wrong_products",
)


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
class Injection:
    """A training, and the fault in it."""

    place: str
    setup: Setup
    fault: Fault | None


@dataclass(frozen=True)
class Answer:
    """What audits said of an injection."""

    injection: Injection
    outcome: str
    """The bit that was flipped, as the injector says it; empty if it never came to that."""
    changed: bool
    """Whether any rank's training ends with other bits than without the fault."""
    audits: int
    findings: list[dict[str, Any]]
    log: str

    @property
    def first(self) -> Mapping[str, Any]:
        return self.findings[0] if self.findings else {}

    @property
    def exact(self) -> bool:
        """Whether every finding names the rank that was at fault, and no other."""
        assert self.injection.fault is not None
        return bool(self.findings) and all(each["ranks"] == [self.injection.fault.rank] for each in self.findings)

    @property
    def among(self) -> bool:
        """Whether every finding names the rank that was at fault."""
        assert self.injection.fault is not None
        return bool(self.findings) and all(self.injection.fault.rank in each["ranks"] for each in self.findings)


def draw(seed: object, place: str | None = None, kind: FaultKind | None = None, *, batches: int = 8) -> Injection:
    """A training and a fault in it, by a number."""
    rng = random.Random(f"audits {seed}")
    place = place or rng.choice([*PLACES])
    kind = kind or rng.choice(KINDS)
    checkpointing = rng.choice(
        [
            Checkpointing(policy="dense", every_n_steps=rng.randint(1, 3), arguments=EVERY_STEP),
            Checkpointing(policy="sparse", window=rng.randint(1, 3), arguments=EVERY_STEP),
            Checkpointing(policy="differential", every_n_steps=4, batch=2, arguments=EVERY_STEP),
        ]
    )
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
    places = dict(PLACES[place])
    if "stages" not in places and "model" not in places:
        options["model"] = rng.choice(["lists", "mixtral", "stacked", "tied", "batch_norm"])
    phase: FaultPhase = "after_batch_start" if kind != "wrong_products" else "batch_start"
    fault = fail_at(
        rng.randrange(places["world_size"]), rng.randint(FIRST_AUDITED + 1, batches - 3), phase, kind=kind
    )
    made = AuditedStages if "stages" in places else Audited
    return Injection(place, made(**{**options, **places}), fault)


def inject(campaigns: Campaigns, injections: Sequence[Injection]) -> list[Answer]:
    """Run all of them, each once, and what audits said."""
    setups = [replace(each.setup, faults=(each.fault,) if each.fault else ()) for each in injections]  # type: ignore[call-arg]
    lives = campaigns.run_each(setups)
    return [_answer(campaigns, each, life) for each, life in zip(injections, lives, strict=True)]


def _answer(campaigns: Campaigns, injection: Injection, life: AttemptResult) -> Answer:
    (plain,) = campaigns.reference(injection.setup)
    changed = any(differences(plain.end(rank), life.end(rank)) for rank in range(life.world_size))
    struck = lines_of(life.workdir, "struck") if injection.fault is not None else []
    figures = audits_of(life)
    outcome = "; ".join(line["outcome"] for line in struck)
    return Answer(injection, outcome, changed, figures["audits"], figures["findings"], life.log())


def table(answers: Sequence[Answer]) -> str:
    """One line per place and kind: injected, changed the training's end, found, named alone, named among others."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each in answers:
        fault = each.injection.fault
        row = counts[each.injection.place, fault.kind if fault is not None else "none"]
        row.update(injected=1, changed=each.changed, found=bool(each.findings), audits=each.audits)
        if fault is not None:
            row.update(exact=each.exact, among=each.among)
    columns = ("injected", "changed", "found", "exact", "among", "audits")
    lines = [f"{'place':28}{'kind':18}" + "".join(f"{column:>9}" for column in columns)]
    for (place, kind), row in sorted(counts.items()):
        lines.append(f"{place:28}{kind:18}" + "".join(f"{row[column]:9}" for column in columns))
    return "\n".join(lines)
