"""Follow a run's progress from outside, by its log, its manifests and this node's memory.

Nothing is asked of the job. Its log entries, appended when older generations are given up, have a few figures; names show newer
steps: manifests and markers in storage, markers beside memory on this node. So steps between two entries are not seen, and
rates are means between two entries.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.inspection._shared_memory import Leftover, leftovers
from lightning_moe_ckpt.process import read_account
from lightning_moe_ckpt.storage import RunView, StoredGeneration
from lightning_moe_ckpt.storage._log import LogEntry
from lightning_moe_ckpt.storage._open import memory_tag
from lightning_moe_ckpt.tiers import shared_directory

_RECENT = 20
"""Newest samples of an incarnation, whose mean is its present rate."""
_QUIET_SECONDS = 60.0
"""Silence after which a run without a process that holds its memory counts as over or interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Figures of a log entry."""

    unix_time: float
    incarnation: int
    step: int
    """Newest boundary of training."""
    stored: int | None
    """Newest boundary in storage."""
    seconds: float
    """Seconds since the first batch of this incarnation."""
    goodput: Goodput
    """Parts of the run's wall time so far; of an older release all zero."""
    steps: int
    """Taken in this incarnation, replayed ones included."""
    nbytes_captured: int


@dataclass(kw_only=True, slots=True)
class Incarnation:
    """A start of the job, as far as the log knows."""

    number: int
    opened: float | None
    """Seconds since 1970."""
    resumed_from: int | None
    samples: list[Sample] = field(default_factory=list)
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the newest entry."""
    void: str = ""
    """Finding that has made its generations void, and from which step on; empty without one."""

    @property
    def reached(self) -> int | None:
        """Newest known step of this incarnation."""
        return self.samples[-1].step if self.samples else self.resumed_from

    @property
    def goodput(self) -> Goodput:
        """Parts of this start alone, as of its newest entry, the time since the last sign of life of the start before included."""
        measured = self.figures.get("measured")
        own = measured.get("own") if isinstance(measured, Mapping) else None
        return Goodput.read(own) if isinstance(own, Mapping) else Goodput()


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestStep:
    """The newest generation in one tier of one rank."""

    tier: str
    rank: int
    step: int
    age_seconds: float
    held: bool | None = None
    """Whether a process holds the memory; `None` for storage."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """A run at one moment."""

    url: str
    run_id: str
    now: float
    state: str
    """`training`; `finished`; `interrupted` if its processes on this node are gone; `quiet` if nothing is seen of it here."""
    step: int | None
    """Newest known boundary in any tier."""
    last_step: int | None
    stored: int | None
    lag_steps: int | None
    """Boundaries by which storage is behind memory, or behind the log's newest entry."""
    steps_per_second: float | None
    nbytes_per_second: float | None
    """Captured bytes per second; storage gets less where generations are skipped."""
    eta_seconds: float | None
    goodput: Goodput | None
    """Parts of the run's wall time up to the newest entry of the log; `None` without one."""
    lost_steps: int
    """Steps that were taken again after a restart, as far as the log shows."""
    incarnations: tuple[Incarnation, ...]
    places: tuple[NewestStep, ...]
    generations: tuple[StoredGeneration, ...]
    silent_seconds: float | None
    """Seconds since the last visible change."""

    def document(self) -> dict[str, Any]:
        """Return JSON values; `ls` lists the stored generations."""
        whole = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "generations"}
        starts = [{**asdict(incarnation), "reached": incarnation.reached} for incarnation in self.incarnations]
        parts = None if self.goodput is None else {"share": self.goodput.share, **asdict(self.goodput)}
        return whole | {"goodput": parts, "incarnations": starts, "places": [asdict(place) for place in self.places]}


class Follower:
    """Look at a run again and again; entries of the log are read once."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._events: dict[int, LogEntry] = {}

    def look(self, now: float | None = None) -> RunProgress:
        """Read the log, the names in storage and this node's memory. Raises `StorageError` if the medium failed."""
        now = time.time() if now is None else now
        self._events = self._view.events(self._events)
        generations = tuple(self._view.generations())
        incarnations = _incarnations(self._events, self._view.run_id)
        memory = self._memory()
        places = (*_in_memory(memory), *_in_storage(generations, now))
        return _progress(self._view, now, incarnations, places, generations, held=any(each.held_by for each in memory))

    def _memory(self) -> list[Leftover]:
        if self._view.history is None:
            return []
        tag = memory_tag(self._view.history.key, self._view.url)
        return [leftover for leftover in leftovers(shared_directory(), f"*-{tag}-*") if leftover.tag == tag]


def _incarnations(events: Mapping[int, LogEntry], run_id: str) -> tuple[Incarnation, ...]:
    found: dict[int, Incarnation] = {}
    for each in events.values():
        event, number = each.event, each.event.get("incarnation")
        if each.history.run_id != run_id or not isinstance(number, int):
            continue
        if event.get("type") == "open":
            resumed = event.get("resumed")
            step = int(resumed["step"]) if isinstance(resumed, Mapping) else None
            found[number] = Incarnation(number=number, opened=_number(event.get("unix_time")), resumed_from=step)
        if event.get("type") == "void" and number in found:
            found[number].void = f"behind step {event.get('step')}, since {event.get('why')}"
        figures = event.get("figures")
        if not isinstance(figures, Mapping) or (at := _number(event.get("unix_time"))) is None:
            continue
        mine = found.setdefault(
            number, Incarnation(number=number, opened=None, resumed_from=figures.get("resumed_from"))
        )
        mine.figures = dict(figures)
        if isinstance(figures.get("step"), int):
            mine.samples.append(_sample(number, at, figures))
    return tuple(found[number] for number in sorted(found))


def _sample(incarnation: int, at: float, figures: Mapping[str, Any]) -> Sample:
    newest = figures.get("newest")
    stored = newest.get("storage", figures.get("resumed_from")) if isinstance(newest, Mapping) else None
    return Sample(
        unix_time=at,
        incarnation=incarnation,
        step=int(figures["step"]),
        stored=stored if isinstance(stored, int) else None,
        seconds=_number(figures.get("seconds")) or 0.0,
        goodput=Goodput() if (account := read_account(figures)) is None else account.goodput,
        steps=int(_number(figures.get("steps")) or 0),
        nbytes_captured=int(_number(figures.get("nbytes_captured")) or 0),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _in_memory(memory: Sequence[Leftover]) -> list[NewestStep]:
    known = [(each, "host" if each.what == "ring" else "peer") for each in memory]
    return [
        NewestStep(
            tier=tier, rank=each.rank or 0, step=each.step, age_seconds=each.age_seconds, held=bool(each.held_by)
        )
        for each, tier in known
        if each.step is not None
    ]


def _in_storage(generations: Sequence[StoredGeneration], now: float) -> list[NewestStep]:
    """Return each rank's newest marker and, under rank -1, the newest manifest that a restart would try."""
    newest: dict[int, NewestStep] = {}
    for generation in reversed(generations):
        if generation.dead is not None:
            continue
        age = 0.0 if generation.commit is None else max(0.0, now - generation.commit.unix_time)
        ranks = [*generation.ranks, *([-1] if generation.usable else [])]
        for rank in ranks:
            newest[rank] = NewestStep(tier="storage", rank=rank, step=generation.generation.step, age_seconds=age)
    return [newest[rank] for rank in sorted(newest)]


def _progress(
    view: RunView,
    now: float,
    incarnations: tuple[Incarnation, ...],
    places: Sequence[NewestStep],
    generations: tuple[StoredGeneration, ...],
    *,
    held: bool,
) -> RunProgress:
    newest = incarnations[-1] if incarnations else None
    stored = max((place.step for place in places if place.tier == "storage" and place.rank == -1), default=None)
    known = [place.step for place in places if place.tier != "peer"]
    if newest is not None and newest.reached is not None:
        known.append(newest.reached)
    step = max(known, default=None)
    last_step = newest.figures.get("last_step") if newest is not None else None
    (rate, captured), sampled = _rates(newest), [sample for start in incarnations for sample in start.samples]
    silent = _silence(now, incarnations, places)
    finished = isinstance(last_step, int) and stored is not None and stored >= last_step
    gone = not held and any(place.held is False and place.tier == "host" for place in places)
    quiet = gone or (not held and (silent is None or silent > _QUIET_SECONDS))
    left = last_step - step if isinstance(last_step, int) and step is not None else None
    return RunProgress(
        url=view.url,
        run_id=view.run_id,
        now=now,
        state="finished" if finished else "interrupted" if gone else "quiet" if quiet else "training",
        step=step,
        last_step=last_step if isinstance(last_step, int) else None,
        stored=stored,
        lag_steps=None if step is None or stored is None else step - stored,
        steps_per_second=rate,
        nbytes_per_second=captured,
        eta_seconds=left / rate if left is not None and rate and not quiet and not finished else None,
        goodput=max((each.goodput for each in sampled if each.goodput.wall), key=attrgetter("wall"), default=None),
        lost_steps=_lost(incarnations),
        incarnations=incarnations,
        places=tuple(places),
        generations=generations,
        silent_seconds=silent,
    )


def _rates(newest: Incarnation | None) -> tuple[float | None, float | None]:
    """Return steps and captured bytes per second of the newest samples."""
    samples = [] if newest is None else newest.samples[-_RECENT:]
    if len(samples) == 1:
        (only,) = samples
        return (only.steps / only.seconds, only.nbytes_captured / only.seconds) if only.seconds else (None, None)
    if not samples or samples[-1].seconds <= samples[0].seconds:
        return None, None
    first, last = samples[0], samples[-1]
    seconds = last.seconds - first.seconds
    return (last.steps - first.steps) / seconds, (last.nbytes_captured - first.nbytes_captured) / seconds


def _lost(incarnations: Sequence[Incarnation]) -> int:
    pairs = [(each.reached, after.resumed_from or 0) for each, after in pairwise(incarnations)]
    return sum(max(0, reached - resumed) for reached, resumed in pairs if reached is not None)


def _silence(now: float, incarnations: Sequence[Incarnation], places: Sequence[NewestStep]) -> float | None:
    seen = [now - place.age_seconds for place in places]
    for incarnation in incarnations:
        seen += [incarnation.opened] if incarnation.opened is not None else []
        seen += [sample.unix_time for sample in incarnation.samples[-1:]]
    return max(0.0, now - max(seen)) if seen else None


def by_rank(places: Sequence[NewestStep]) -> dict[int, dict[str, NewestStep]]:
    """Return places by rank, then by tier; the newest of several in a tier."""
    found: dict[int, dict[str, NewestStep]] = defaultdict(dict)
    for place in places:
        if (known := found[place.rank].get(place.tier)) is None or known.step < place.step:
            found[place.rank][place.tier] = place
    return dict(sorted(found.items()))
