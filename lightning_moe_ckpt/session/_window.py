"""Windows: the votes of all ranks before a window begins, the window itself, and each tier's share of their generations.

Votes are records with named fields, which one exchange carries as integers.

Under TierCheck's policy a window is one boundary: a *base*, or a difference, the gradients that lead to it from the
boundary before. A boundary is taken as a difference if all ranks took the boundary before, the newest optimizer step
leads from there to here on all ranks, and the last base is not too long ago. Otherwise a base is taken, which needs
nothing else. So no generation follows on a failed one.

Source: TierCheck (2026), Sec. 3.2 and 3.4.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.policies import Chains
from lightning_moe_ckpt.process import StallMeter
from lightning_moe_ckpt.snapshot import DifferentialRecorder, StateView, WindowLayout, log_whole, repeatable
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import SealedSegment, SegmentRing, SkipCounter, TierWorker

log = rank_logger(__name__)

_DTYPES = {"lossless": torch.float32, "bf16": torch.bfloat16, "compressed": torch.uint8}
PPM = 1_000_000
"""Microseconds of a second: votes are integers."""
_OUTSTANDING = 32
"""Most generations per tier that votes speak of; their bits fit into one integer of the exchange."""


class WindowVote(NamedTuple):
    """One rank's vote before a window, ahead of its tiers and of plans."""

    has_room: int
    """Whether the rank's ring has room for a window."""
    journal_nbytes: int
    """Bytes that a journal record needs; 0 if all records had room."""
    spoiled: int
    """Whether the rank could not take the whole last window."""
    fits: int
    """Whether the next plan fits into the rank's ring."""
    unnamed: int
    """Whether the ring has lost its name."""
    follows: int = 0
    """Whether this boundary can be a difference to the boundary before."""


class LaneVote(NamedTuple):
    """One rank's vote on a tier, before a window."""

    idle: int
    """Microseconds for which the tier has been idle, at least 1; 0 while at work."""
    holds: int
    """Bits of the outstanding generations that the tier holds."""
    gave_up: int
    """Bits of the outstanding generations that the tier will never hold."""
    lost_base: int
    """Whether the tier lost the generation that later ones build on."""


class PacingVote(NamedTuple):
    """One rank's `Costs` before a window."""

    is_due: int
    """Whether the rank has measured for long enough."""
    is_known: int
    is_large: int
    """Whether the rank takes so many bytes that the run begins slowly."""
    costs: tuple[int, ...]
    """See `Costs.row`."""


class Costs(NamedTuple):
    """Costs on one rank, or the largest of all ranks, in seconds."""

    known: bool
    """Whether there were enough quiet steps lately for comparisons."""
    step: float
    """Seconds per quiet step, hooks included."""
    base: float
    """Seconds in hooks per quiet step."""
    window: float
    """Seconds per window: in hooks, and by longer steps."""
    owed: float
    """Seconds by which checkpoints have so far cost more than the target allows."""
    tiers: tuple[tuple[float, float], ...] = ()
    """Per tier: seconds by which a generation makes steps longer, and seconds for which the tier is at work."""

    def row(self) -> tuple[int, ...]:
        """Return the seconds in microseconds, in the order of the fields."""
        return tuple(round(each * PPM) for each in (*self[1:-1], *chain.from_iterable(self.tiers)))

    @classmethod
    def largest(cls, votes: Sequence[PacingVote]) -> Costs:
        """Return the largest costs of all ranks."""
        columns = zip(*(vote.costs for vote in votes), strict=True)
        step, base, window, owed, *tiers = (max(column) / PPM for column in columns)
        known, pairs = all(vote.is_known for vote in votes), tuple(zip(tiers[::2], tiers[1::2], strict=True))
        return cls(known, max(step, 1 / PPM), base, window, owed, pairs)


class TiersVote(NamedTuple):
    """One rank's vote on all tiers, before a window."""

    lanes: tuple[LaneVote, ...]
    pacing: PacingVote
    own_work: int = 0
    """See `Stragglers.vote`."""

    def row(self) -> list[int]:
        """Return the vote as integers."""
        return [self.own_work, *chain.from_iterable(self.lanes), *self.pacing[:-1], *self.pacing.costs]

    def read(self, row: Sequence[int]) -> TiersVote:
        """Return the vote in another rank's row, which has as many integers as this vote."""
        size = len(LaneVote._fields)
        end = 1 + size * len(self.lanes)
        lanes = tuple(LaneVote(*row[at : at + size]) for at in range(1, end, size))
        due, known, large, *costs = row[end:]
        return TiersVote(lanes, PacingVote(due, known, large, tuple(costs)), row[0])


def gather_votes(
    exchange: Exchange, own: WindowVote, tiers: TiersVote, inputs: Sequence[int]
) -> tuple[list[WindowVote], list[TiersVote], list[list[int]]]:
    """Return all ranks' votes, votes on tiers, and inputs of plans. Collective."""
    told = tiers.row()
    size, behind = len(own), len(own) + len(told)
    votes, of_tiers, of_plans = [], [], []
    for row in exchange.gather([*own, *told, *inputs]):
        votes.append(WindowVote(*row[:size]))
        of_tiers.append(tiers.read(row[size:behind]))
        of_plans.append(row[behind:])
    return votes, of_tiers, of_plans


@dataclass(kw_only=True, eq=False)
class Window:
    """A generation from the start of its window until the ring recycles it."""

    generation: GenerationId
    first: int
    """First boundary."""
    layout: WindowLayout
    ring: SegmentRing
    spoiled: bool = False
    """Whether a segment could not be taken: the window runs on in step with other ranks, but gives no generation."""
    why: str = ""
    """Reason why this rank spoiled the window; empty unless `spoiled`."""
    segments: list[SealedSegment] = field(default_factory=list)
    workers: list[TierWorker] = field(default_factory=list)
    """Workers of the tiers that take the window."""
    is_settled: bool = True
    """Whether training does not wait until memory has the generation."""
    is_chained: bool = False
    """Whether generations may be differences, on all ranks alike."""
    is_link: bool = False
    """Whether this window is a difference; else it is a whole base."""
    ends_batch: bool = True
    """Whether storage gets gathered differences up to this window, or waits for more."""
    unix_time: int = field(default_factory=lambda: int(time.time()))
    """Start of the window in seconds, as its markers in all tiers state."""


@dataclass(kw_only=True, eq=False)
class TierLane:
    """One worker, and the facts that all ranks know about it."""

    worker: TierWorker
    skips: SkipCounter
    given: list[GenerationId] = field(default_factory=list)
    """Generations given to the tier and not known to be superseded, oldest first; the same on all ranks."""
    idle: bool = False
    """Whether the worker was idle on all ranks at the latest vote, and has rested."""
    base: GenerationId | None = None
    """Newest generation complete on all ranks, on which a partial generation may be built."""
    num_failed: int = 0
    """Given generations that some rank gave up."""
    attempted: bool = False
    """Whether the window before attempted a whole generation, and the tier still has no base."""
    chain: list[GenerationId] | None = None
    """Given generations that differences may follow on, oldest first; `None` if differences wait for the next base."""
    last_base: GenerationId | None = None
    """Newest base of differences given to the tier."""
    supersedes: GenerationId | None = None
    """Newest generation complete on all ranks, while the worker still keeps its predecessors."""
    gathered: list[Window] = field(default_factory=list)
    """Differences to be stored together, pinned, oldest first."""

    def vote(self, idle_for: int) -> LaneVote:
        """Return this rank's vote; `idle_for` was asked first, since a failure is recorded before the worker is idle again."""
        holds = gave_up = 0
        for index, generation in enumerate(self.given):
            holds |= self.worker.holds(generation) << index
            gave_up |= self.worker.gave_up(generation) << index
        return LaneVote(idle_for, holds, gave_up, int(self.worker.lost_base))

    def agreed(
        self, votes: Sequence[LaneVote], filling: GenerationId | None
    ) -> tuple[list[GenerationId], list[GenerationId]]:
        """Take all votes; return the generations now complete on all ranks, and the given-up ones, oldest first."""
        common, lacking = -1, 0
        for vote in votes:
            common, lacking = common & vote.holds, lacking | vote.gave_up
            if vote.lost_base:
                self.base = None
        complete = [generation for index, generation in enumerate(self.given) if common >> index & 1]
        given_up = [each for index, each in enumerate(self.given) if each != filling and lacking >> index & 1]
        self.given = [generation for generation in self.given[common.bit_length() :] if generation not in given_up]
        if self.chain is not None and not set(given_up).isdisjoint(self.chain):
            self.chain = None
        self.num_failed += len(given_up)
        return complete, given_up

    def complete(self, generation: GenerationId) -> None:
        self.base, self.attempted = generation, False

    def cannot_take(self, layout: WindowLayout) -> bool:
        """Return whether the tier needs a base for `layout`, and has none."""
        return self.worker.uses_references and layout.is_incomplete and self.base is None

    def attempt(self) -> bool:
        """Return whether to attempt a whole generation now: in every second window while attempts fail."""
        self.attempted = not self.attempted
        return self.attempted

    def let_go(self, generation: GenerationId) -> None:
        """Drop a gathered difference that some rank could not take, and all gathered after it."""
        for index, window in enumerate(self.gathered):
            if window.generation == generation:
                for each in self.gathered[index:]:
                    each.ring.unpin(each.generation)
                del self.gathered[index:]
                return

    def take(self, generation: GenerationId) -> None:
        self.idle = False
        self.given.append(generation)
        del self.given[:-_OUTSTANDING]
        self.skips.taken()


class Chain:
    """The newest base and the differences behind it.

    Args:
        chains: settings of the policy.
        view: live state, which gets the gradients of each difference to be copied.
        stalls: meter of waits.
        may_edit_steps: whether the user's code may change shards beside a step without a trace.
    """

    def __init__(self, chains: Chains, view: StateView, stalls: StallMeter, *, may_edit_steps: bool) -> None:
        exact = chains.mode == "lossless"
        view.repeatable, whole = repeatable(view, exact=exact)
        view.difference_dtype = _DTYPES[chains.mode]
        log_whole(whole, len(view.params))
        if not exact:
            log.warning(
                "restarts are not exact: gradients are kept %s, and what is restored differs by what that leaves out from what "
                "was trained. `DifferentialCheckpoint(mode='lossless')` keeps them as they are.",
                "as bfloat16" if chains.mode == "bf16" else "compressed",
            )
        self._chains, self._stalls = chains, stalls
        self.recorder = DifferentialRecorder(view, error_feedback=chains.error_feedback, digests=may_edit_steps)
        self._base = self._last = -1
        """Steps of the newest base, and of the newest boundary that a difference may follow on; -1 without."""
        self.reads_gradients = False
        """Whether gradients of the newest boundary are being copied."""

    def follows(self, step: int, *, new_plan: bool, lost: bool) -> bool:
        """Return whether boundary `step` can be a difference on this rank; call once per boundary.

        A base is due where a `new_plan` comes into force, and sooner where a tier has `lost` its chain.
        """
        after = step - self._base
        due = new_plan or (lost and after >= self._chains.batch) or after >= self._chains.every_n_steps
        return self.recorder.boundary() and self._last == step - 1 and not due

    def begin(self, window: Window) -> None:
        """Go on with a window that begins."""
        self._last = window.first
        if not window.is_link:
            self._base = window.first
        window.ends_batch = self._chains.ends_batch(window.first - self._base)

    def capture(self, window: Window, outcome: Journal) -> Journal:
        """Make gradients ready to be copied for a difference; return the journal's outcome half with their step's settings."""
        self.reads_gradients = window.is_link
        if not window.is_link:
            self.recorder.based()
            return outcome
        if self._chains.mode == "compressed":
            with self._stalls.measure_both("compression"):
                (layout,) = window.layout.steps
                window.layout = replace(window.layout, steps=[self.recorder.compress(layout)])
        return {**outcome, "consumed": self.recorder.settings()}

    def take_whole(self, window: Window, layout: WindowLayout) -> None:
        """Make a difference a base, in the layout of whole boundaries. On all ranks."""
        self._base, window.is_link, window.layout = window.first, False, layout
        self.recorder.based()
        window.ring.whole(window.generation)

    def release(self) -> bool:
        """Let go of the copied gradients; return whether they are still as the step consumed them."""
        self.reads_gradients = False
        return self.recorder.release()

    def abort(self) -> None:
        """Follow no more on the newest boundary."""
        self._last = -1
