"""Name the ranks that compute or hold other bits than the ranks that should have the same, from tables that all ranks have.

A *role* is one rank's part of a step: its batch, random state and buffers. Its owner plays it in the step that counts, other
ranks play it for comparison. A *trace* is what one play of a role left: the digests of all messages that it sent and received,
in their order, and last the digest of its gradients. Where two traces part at a message that was received, another rank was
wrong first. So of ranks that depend on each other (stages, holders of each other's experts) only the one is named whose own
work parted from what another rank made of the same.

Two plays that differ say that one is wrong, not which. Three do, and so does a rank that plays its role again and gets
something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

OnFault = Literal["warn", "restart", "stop"]

RECEIVED, MADE = 0, 1
"""Kinds of digests in a trace: of a message from another rank, and of what this rank computed."""

Trace: TypeAlias = Sequence[Sequence[int]]
"""Kind and digest, in order."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Bits that differ between ranks that should have the same; equal on all ranks."""

    step: int
    """Optimizer step, as its boundary is numbered, in which the ranks differed; of a state, the boundary."""
    check: Literal["state", "compute"]
    """Which of the two checks has found it."""
    ranks: tuple[int, ...]
    """Ranks at fault: one where it is known which, else all that may be."""
    nodes: tuple[str, ...]
    """Host names of these ranks, each once."""
    operators: tuple[str, ...]
    """Names of operators with differing state or gradients, in the order of the model."""
    sticky: bool
    """Whether the same work, done again, differed again; a state is as it is."""
    text: str
    """All of it in words, for logs."""


@dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """Audits of one incarnation, the same on all ranks apart from seconds."""

    audits: int = 0
    """Number of audits with a result."""
    audited: int | None = None
    """Step of the newest clean audit of this incarnation; `None` before one."""
    findings: tuple[Finding, ...] = ()
    """All findings, oldest first."""
    seconds: float = 0.0
    """Seconds of the training thread in audits, on this rank."""
    left_out: tuple[str, ...] = ()
    """Why steps are not repeated on other ranks, so that state alone is compared; empty if they are."""


def suspects(plays: Mapping[int, Mapping[int, Trace]], repeats: Mapping[int, Sequence[Trace]]) -> tuple[int, ...]:
    """Return the ranks that explain all differences, ascending; empty without a difference.

    Args:
        plays: for each role, by its owner's rank, the traces of the ranks that played it, the owner's first one included.
        repeats: for each rank, the traces of its own role as often as it was played there, the first one included.
    """
    changed = {rank for rank, (first, *later) in repeats.items() if any(_odd({0: first, 1: each}) for each in later)}
    return tuple(sorted(changed or {rank for traces in plays.values() for rank in _odd(traces)}))


def _odd(traces: Mapping[int, Trace]) -> set[int]:
    """Return who parts from the majority by own work; without a majority, all who part from each other by it."""
    texts = {who: repr(trace) for who, trace in traces.items()}
    (most, number), *_ = Counter(texts.values()).most_common(1)
    if number == len(traces):
        return set()
    if 2 * number > len(traces):
        like = next(who for who, text in texts.items() if text == most)
        return {who for who, text in texts.items() if text != most and is_own(traces[who], traces[like])}
    pairs = [(a, b) for a in traces for b in traces if a < b and texts[a] != texts[b]]
    return {who for a, b in pairs if is_own(traces[a], traces[b]) for who in (a, b)}


def is_own(trace: Trace, other: Trace) -> bool:
    """Return whether two traces part at what was computed, and not at a message from elsewhere."""
    for mine, its in zip(trace, other, strict=False):
        if [*mine] != [*its]:
            return MADE in (mine[0], its[0])
    return len(trace) != len(other)


def odd_holders(digests: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks whose copy of a state is not the majority's; without a majority, all; empty if all are equal."""
    (most, number), *_ = Counter(digests.values()).most_common(1)
    if number == len(digests):
        return ()
    return tuple(sorted(rank for rank, digest in digests.items() if digest != most or 2 * number <= len(digests)))


def shown(ranks: Collection[int], hosts: Sequence[str]) -> str:
    """Return ranks with their hosts, in words."""
    return " and ".join(f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}" for rank in ranks)
