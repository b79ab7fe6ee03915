"""Make a rank's journal for a boundary from all writers' journals, after a resume on other ranks.

Entries equal on all writers go on unchanged. Entries by rank are kept, derived, merged or left out, and named. Entries by name or
parameter are joined over pipeline stages; each stage takes its own when it restores. Positions in data wait for the loaders
(`placed`), and states for their metrics (`_metrics.settled`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning.pytorch import Trainer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.fit.loaders._loaders import use_batches_done
from lightning_moe_ckpt.fit.loaders._positions import spread_of
from lightning_moe_ckpt.fit.loaders._random import NO_FETCHES
from lightning_moe_ckpt.fit.loops._trainer import stage_size
from lightning_moe_ckpt.fit.objects._kinds import CONTENT
from lightning_moe_ckpt.fit.objects._values import unnumbered
from lightning_moe_ckpt.journal import UNFIT, Journal, RngState, differs, retold_rng
from lightning_moe_ckpt.recovery import Retold, joined_outcome
from lightning_moe_ckpt.snapshot import Topology

log = rank_logger(__name__)

OTHER_RANKS = "other_ranks"
"""Key in start halves by other ranks: their number per pipeline stage."""
_MOST_NAMED = 4
_OF_RANK_0 = {
    "schedulers": "schedulers",
    "param_groups": "fields of the optimizer's groups",
    "optimizer": "state that the optimizer keeps elsewhere",
    "precision": "loss scale",
    "module": "what `on_save_checkpoint` adds",
    "datamodule": "data module",
}
"""Entries taken from rank 0, and their names."""


def retold(journals: Sequence[Journal], was: Topology, rank: int, world_size: int) -> Retold:
    """Return the journal of a boundary for `rank` of `world_size` ranks, from the `journals` of its writers, whose topology `was`."""
    if "imported" in journals[0]["start"]:
        return Retold(journals[0], [])
    telling = _Telling(was.world_size // was.pipeline_parallel, rank, world_size)
    starts, outcomes = ([journal[half] for journal in journals] for half in ("start", "outcome"))
    return Retold({"start": telling.start(starts), "outcome": telling.outcome(outcomes)}, telling.notes)


class _Telling:
    """A boundary's journal in the making. `size`: writers per pipeline stage."""

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self._size, self._rank, self._world_size = size, rank, world_size
        self._named: dict[str, list[str]] = {}
        self._drew = False
        """Whether ranks had different random states."""

    @property
    def notes(self) -> list[str]:
        """What is not exact, in words."""
        found = []
        for what, names in self._named.items():
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            found.append(f"{what} {', '.join(names[:_MOST_NAMED])}{more}".rstrip())
        return found + ["random numbers, which ranks drew apart from each other"] * self._drew

    def start(self, starts: Sequence[Mapping[str, Any]]) -> Journal:
        """Return the start half."""
        found = self._joined(starts) | {"batch": None, OTHER_RANKS: self._size}
        unfit = [start[UNFIT] for start in starts if UNFIT in start]
        if "end" in starts[0]:
            end = self._joined([{**start, **start.get("end", {})} for start in starts])
            found["end"] = {name: end[name] for name in starts[0]["end"]}
        return {**found, **({UNFIT: unfit[0]} if unfit else {})}

    def outcome(self, outcomes: Sequence[Mapping[str, Any]]) -> Journal:
        """Return the outcome half."""
        own = outcomes[self._rank % len(outcomes)]
        if own.get("batches"):
            self._name("logged batches, of which each rank repeats those of one rank")
        return {**joined_outcome(outcomes, self._size), "batches": own.get("batches", []), "losses": None}

    def _name(self, what: str, name: str = "") -> None:
        names = self._named.setdefault(what, [])
        if name not in names:
            names.append(name)

    def _by_name(self, what: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return entries by name, each from the first rank in a stage; note names with differences inside a stage."""
        found: dict[str, Any] = {}
        for first in range(0, len(rows), self._size):
            own, *others = rows[first : first + self._size]
            found = {**own, **found}
            for name in dict.fromkeys(chain(own, *others)):
                if any((name in own) != (name in each) or differs(each.get(name), own.get(name)) for each in others):
                    self._name(what, f"`{unnumbered(name).removesuffix(CONTENT)}`")
        return found

    def _joined(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        first, found = rows[0], dict(rows[0])
        for name, what in _OF_RANK_0.items():
            if any(differs(row.get(name), first.get(name)) for row in rows[1 : self._size]):
                self._name(what)
        for name in [each for each in ("callbacks", "attributes", "attributes_since") if each in first]:
            found[name] = self._by_name(name.removesuffix("_since"), [row.get(name, {}) for row in rows])
        found["trained"], found["metrics"] = self._trained(rows), self._metrics([row["metrics"] for row in rows])
        layers = [row["parts"]["layers"] for row in rows]
        found["parts"] = {
            **first["parts"],
            "batches": {**first["parts"]["batches"], OTHER_RANKS: True},
            "layers": {
                kind: self._by_name("state of layers", [each.get(kind, {}) for each in layers]) for kind in layers[0]
            },
        }
        return found | (self._drawn(rows) if "random" in first else {})

    def _trained(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        firsts = [row["trained"] for row in rows[:: self._size]]
        if any(row["trained"].get("kept") for row in rows):
            self._name("gradients that outlive a step, which begin with zeros")
        joined = {name: b"".join(each[name] for each in firsts) for name in ("gradients", "requires_grad")}
        added = [[*chain(*groups)] for groups in zip(*(each["added"] for each in firsts), strict=True)]
        left_out = {"kept", "partial", *(("order", "keys") if len(firsts) > 1 else ())}
        return {**{name: each for name, each in firsts[0].items() if name not in left_out}, **joined, "added": added}

    def _metrics(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return this rank's newest logged values, and all ranks' values accumulated in this epoch, as lists by rank."""
        logged = [row["epoch"] for row in rows[: self._size]]  # all stages log the same
        epoch = {name: [each[name] for each in logged if name in each] for name in chain(*logged)}
        states = [row["module"] for row in rows]
        module = {name: [each[name] for each in states if name in each] for name in chain(*states)}
        if len(rows) > self._size:  # mostly one stage alone updates a metric that all have
            module = {name: [each for each in of if each["updates"]] or of for name, of in module.items()}
        return {**rows[self._rank % len(rows)], "epoch": epoch, "module": module}

    def _drawn(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return random state at all moments, and the entries with random state inside: fetches, loads, data."""
        own, first = rows[self._rank % len(rows)], rows[0]
        random = {name: self._rng(r["random"].get(name) for r in rows) for name in first["random"] if name != "workers"}
        if any(row["random"].get("workers") for row in rows):
            self._name("seeds of persistent workers, which are drawn anew")
        fetches = own.get("fetches", NO_FETCHES)
        states = {at: self._rng(row["fetches"]["states"].get(at) for row in rows) for at in fetches["states"]}
        loads = {name: dict(entry) for name, entry in first.get("loads", {}).items()}
        for name, entry in loads.items():
            if entry["again"] is not None:
                drew = self._rng((row["loads"][name]["again"] or {}).get("random") for row in rows)
                entry["again"] = {**entry["again"], "random": drew}
        fetched = {"fetches": {**fetches, "states": states}, "loads": loads} if "fetches" in first else {}
        return {"random": {**random, "workers": {}}, "data": {**first.get("data", {}), "own": None}, **fetched}

    def _rng(self, states: Iterable[RngState | None]) -> RngState | None:
        state, same = retold_rng([*states], self._rank, self._world_size)
        self._drew |= not same
        return state


def placed(trainer: Trainer, start: Journal, *, logged: bool) -> Journal:
    """Return a start half with its position counted in this job's batches, and give the loops this position.

    Samples count as consumed by whole steps; if batches are `logged`, data goes on with the pipeline's next ones. Rank 0 warns
    about differences. Call once loaders exist and accumulation is in force. Raises `IdentityMismatch` if only users' code, or
    another package, knows the next samples.
    """
    was, now, done = start.get("spread") or [_UNSAID], spread_of(trainer), start["batches_done"]
    inside = done and not (logged or start["between_epochs"])
    if (own := next((each["own"] for each in (*was, *now) if "own" in each), "")) or not now:
        _require(not inside or start[OTHER_RANKS] == stage_size(trainer), own, start)
        return start
    before, after = start["loops"]["settings"]["accumulate_grad_batches"], trainer.accumulate_grad_batches
    then, here = (spread[0]["size"] * spread[0]["replicas"] for spread in (was, now))
    if then * before != here * after:
        ways = {"batch_size": now[0]["replicas"] * after, "accumulate_grad_batches": here}
        kept = [f"{name}={then * before // each}" for name, each in ways.items() if then * before % each == 0]
        log.warning(
            "an optimizer step took %d samples (batch_size=%d, accumulate_grad_batches=%d), and takes %d from here on, with the same "
            "learning rates. To keep that number: %s",
            *(then * before, was[0]["size"], before, here * after, " or ".join(kept) or "another number of ranks"),
            alike=True,
        )
    if not inside:
        return start
    if (orders := [each[0]["order"] for each in (was, now)])[0] != orders[1]:
        said = "samples were %s and are %s now: in the rest of this epoch some come again, and others not"
        log.warning(said, *orders, alike=True)
    place, fetched = (number * then // (here * after) * after for number in (done, done - start["not_fetched"]))
    if place * here != done * then:
        _require(len(was) == len(now) == 1, "a combination of loaders", start)
        said = "the newest %d samples are trained on again: they do not fill a step"
        log.warning(said, done * then - place * here, alike=True)
    use_batches_done(trainer, place)
    fetches = start["fetches"] if place == done else NO_FETCHES
    return {**start, "batches_done": place, "not_fetched": place - fetched, "fetches": fetches}


_UNSAID = {"own": "a loader of an older release, which did not store how samples are spread over ranks,"}


def _require(holds: bool, own: str, start: Journal) -> None:
    if not holds:
        raise IdentityMismatch(
            f"{own} decides which samples a rank takes of how many, and another number of ranks cannot go on within the epoch. Start on the "
            "ranks that wrote it, use torch's `DistributedSampler`, or let the data go on with what the pipeline gives: batches='log'."
        )
