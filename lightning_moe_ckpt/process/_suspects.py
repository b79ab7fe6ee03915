"""Name the ranks that compute or hold other bits than the ranks that should have the same, from tables that all ranks have.

A *role* is one rank's part of a step: its batch, random state and buffers. Its owner plays it in the step that counts, other
ranks play it for comparison. A *trace* is left by one play: the digests of all messages sent and received, in their
order, and last the digest of its gradients. Where two traces part at a received message, another rank was wrong first. So of
ranks that depend on each other (stages, holders of each other's experts) only the one is named whose own work parted from
another rank's result for the same role.

Two plays that differ show a fault, but not its rank. Three do, and so does a rank with another result when it plays its role again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from torch import Tensor

OnFault = Literal["warn", "restart", "stop"]

RECEIVED, MADE = 0, 1
"""Kinds of digests in a trace: for a message from another rank, and for this rank's own results."""
_MOST_DISTANCES = 65

Trace: TypeAlias = Sequence[Sequence[int]]
"""Kind and digest, in order."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Bits that differ between ranks that should have the same; equal on all ranks."""

    step: int
    """Optimizer step, numbered as its boundary, in which the ranks differed; for a state, the boundary."""
    check: Literal["state", "compute"]
    """Check that has found it."""
    ranks: tuple[int, ...]
    """Ranks at fault: one where it can be told, else all that may be."""
    nodes: tuple[str, ...]
    """These ranks' host names, each once."""
    operators: tuple[str, ...]
    """Operators with differing state or gradients, in the model's order."""
    sticky: bool
    """Whether the same work, done again, differed again; a state is as it is."""
    text: str
    """All of it in words, for logs."""


@dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """One incarnation's audits, the same on all ranks apart from seconds."""

    audits: int = 0
    """Number of audits with a result."""
    audited: int | None = None
    """Step of this incarnation's newest clean audit; `None` before one."""
    findings: tuple[Finding, ...] = ()
    """All findings, oldest first."""
    seconds: float = 0.0
    """Seconds of the training thread in audits, on this rank."""
    left_out: tuple[str, ...] = ()
    """Why steps are not repeated on other ranks, so that state alone is compared; empty if they are."""

    def document(self) -> dict[str, object]:
        """Return the figures for the run's log; empty without audits."""
        if not self.audits:
            return {}
        return {"number": self.audits, "clean": self.audited, "found": [each.text for each in self.findings]}


class Messages:
    """This rank's messages in forward and backward, to others and from them, while somebody listens."""

    listener: ClassVar[Callable[[int, Sequence[Tensor]], None] | None] = None
    """Called with `RECEIVED` or `MADE` and each message's tensors."""


class Judgement(NamedTuple):
    """Verdict on the ranks that played a step."""

    ranks: tuple[int, ...] = ()
    """Ranks at fault, ascending; empty if there is no fault."""
    sticky: bool = False
    """Whether the fault came again when the work was done again."""
    harmless: str = ""
    """Why a difference is no fault; empty otherwise."""


Plays: TypeAlias = Mapping[int, Mapping[int, Sequence[Trace]]]
"""Traces by the rank that played and the role's owner, in the plays' order.

An owner's are the step that counts, its repetitions, and last that from the bytes that were sent to others."""


def judge(plays: Plays, replica: Callable[[int], int], partings: Mapping[str, str] | None = None) -> Judgement:
    """Return the ranks that repeated plays show to be at fault.

    Args:
        plays: traces.
        replica: returns a rank's replica, wrong as a whole if one rank is.
        partings: operations in which repetitions of a role parted first, by how: in the result of one and the same work on some `device`,
            or in what `code` had called for. Without any the repetitions were equal.
    """
    if partings and "device" not in partings:
        where = partings["code"]
        return Judgement(
            harmless=f"a step depends on what other ranks are not given, or on how often it is done: first in `{where}`"
        )
    by_role: dict[int, dict[int, Sequence[Trace]]] = {}
    for player, roles in plays.items():
        for owner, traces in roles.items():
            by_role.setdefault(owner, {})[player] = traces
    for owner, traces_of in by_role.items():
        own, others = traces_of[owner], [each for rank, some in traces_of.items() if rank != owner for each in some]
        if others and all(each == own[0] != own[-1] for each in own[:-1]) and all(each == own[-1] for each in others):
            return Judgement(harmless=f"a step of rank {owner} depends on where its batch lies in memory")
    varied = {
        player
        for player, roles in plays.items()
        for traces in roles.values()
        if any(_odd({0: traces[0], 1: each}) for each in traces[1:])
    }
    if len({replica(rank) for rank in varied}) > 1:
        return Judgement(
            harmless="steps differ on one and the same device, on several ranks: some kernel is not deterministic"
        )
    if varied:
        played = [traces for rank in varied for traces in plays[rank].values()]
        again = any(len(traces) - max(map(traces.count, traces)) > 1 for traces in played)
        return Judgement(tuple(sorted(varied)), sticky=again)
    odd = {rank for traces_of in by_role.values() for rank in _odd({who: some[0] for who, some in traces_of.items()})}
    return Judgement(tuple(sorted(odd)), sticky=True)


def _odd(traces: Mapping[int, Trace]) -> set[int]:
    """Return the ranks that part from the majority by own work; without a majority, all that part from each other by it."""
    texts = {who: repr(trace) for who, trace in traces.items()}
    (most, number), *_ = Counter(texts.values()).most_common(1)
    if 2 * number > len(traces):
        like = next(who for who, text in texts.items() if text == most)
        pairs = [(who, like) for who, text in texts.items() if text != most]
        return {who for who, _ in pairs if _is_own(traces[who], traces[like])}
    pairs = [(a, b) for a in traces for b in traces if a < b and texts[a] != texts[b]]
    return {who for a, b in pairs if _is_own(traces[a], traces[b]) for who in (a, b)}


def _is_own(trace: Trace, other: Trace) -> bool:
    """Return whether two traces part at a result, and not at a message from elsewhere."""
    for mine, its in zip(trace, other, strict=False):
        if [*mine] != [*its]:
            return MADE in (mine[0], its[0])
    return len(trace) != len(other)


def distance(hosts: Sequence[str], stage_size: int, ep_size: int) -> int:
    """Return how many replicas further the rank is that plays a rank's role: on another node, where there is one."""
    replicas = stage_size // ep_size

    def elsewhere(shift: int) -> int:
        pairs = ((rank, rank - rank % stage_size + (rank + shift * ep_size) % stage_size) for rank in range(len(hosts)))
        return sum(hosts[rank] != hosts[other] for rank, other in pairs)

    shifts = range(1, min(replicas, _MOST_DISTANCES))
    return max(shifts, key=lambda shift: (elsewhere(shift), -shift), default=0)


def odd_holders(digests: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks whose copy is not the majority's; without a majority, all; empty if all are equal."""
    (most, number), *_ = Counter(digests.values()).most_common(1)
    if number == len(digests):
        return ()
    return tuple(sorted(rank for rank, digest in digests.items() if digest != most or 2 * number <= len(digests)))
