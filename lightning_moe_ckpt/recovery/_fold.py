"""Bring a base and its differences, and fold them into one state.

Every boundary has its own place in each tier: memory has the newest one by one, storage has them in batches, and each
comes from the cheapest good copy. The bytes in flight are bounded, however long the chain is. A chain with a bad link
ends at the step before it: that state is as exact as the newest.

Differences are applied in one pass over the state for many steps. Each part of a parameter is read and written once:
its gradients are applied in the order of the steps, with each step's settings. A part without a gradient comes whole,
from the newest step.

Source: TierCheck (2026), Sec. 3.3, "fused multi-step differential checkpoint replaying". We differ in agreeing per
chain on verified links of every rank; the last step is applied in the same pass, and the result is exact where the
optimizer's arithmetic is repeated, see `replay_adam`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, Corrupt
from lightning_moe_ckpt.journal import Journal, decode_journal
from lightning_moe_ckpt.native import AdamState, AdamStep, host_buffer, replay_adam, unpack_gradient
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.policies import Plan
from lightning_moe_ckpt.recovery._assembly import Assembly, Read
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, Restored, RestorePlan
from lightning_moe_ckpt.recovery._index import Links, LinkSource, named_links, neighbours
from lightning_moe_ckpt.recovery._inventory import Replica, Version, stored
from lightning_moe_ckpt.recovery._loading import stored_layout
from lightning_moe_ckpt.recovery._transfer import Transfer, Transport
from lightning_moe_ckpt.snapshot import GRADIENT, JOURNAL, PACKED, PARAM, PRESENT, PlanRecord, is_average, step_settings
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RecordRows, SegmentEntry, SegmentLayout

log = rank_logger(__name__)

AT_ONCE = 8
"""Most differences brought and applied at once."""


def base_step(links: Links, step: int) -> int | None:
    """Return the step of the base under a chain up to `step`; `None` if a link between is missing."""
    while sources := links.get(step):
        if sources[0].is_base:
            return step
        step -= 1
    return None


class ChainRestore:
    """Restore of this rank's chains up to the boundary `last`; all ranks do it together, and one may have no chain."""

    def __init__(self, transport: Transport, transfer: Transfer, chains: Sequence[Links], last: int) -> None:
        self._transport, self._transfer, self._chains, self._last = transport, transfer, chains, last
        self.reasons: list[str] = []
        """Reasons why the chains were given up, or end earlier; the same on all ranks."""
        self.reached = last
        """Last boundary that is good on all ranks."""
        self.supplied = Counter[Replica]()
        """Bytes read, by copy."""

    def run(self, at_once: int = AT_ONCE) -> list[_Brought] | None:
        """Return this rank's states at `reached`; `None`, on all ranks, without a base. Collective."""
        last = self._last
        bases = self._transport.gather_values([base_step(links, last) for links in self._chains])
        first, *others = {base for own in bases for base in own}
        if others or first is None:
            lacking = [f"rank {rank}" for rank, own in enumerate(bases) if None in own]
            self.reasons.append(f"{', '.join(lacking) or 'ranks together'}: what it follows on is not all there")
            return None
        if (brought := self._bring([first])) is None or self.reached < first:
            return None
        states = [state for state, *_ in brought]
        seconds, unfit = 0.0, list[tuple[int, str]]()
        for steps in _portions(range(first + 1, last + 1), at_once):
            if (brought := self._bring(steps)) is None:
                return None
            started = time.perf_counter()
            try:
                for state, links in zip(states, brought, strict=True):
                    if links and not unfit:
                        fold(state.segment, state.layout, [each.difference for each in links])
            except Corrupt as error:  # the state is no more that of any step, and all ranks begin again
                unfit = [(steps[0], str(error))]
            seconds += time.perf_counter() - started
            if self.reached < steps[-1]:
                break
        if any(said := self._transport.gather_values(unfit)):
            if at_once == 1:  # now it is known at which step
                self._end(said)
            self._last = self.reached
            return self.run(1)
        log.info("%d differences were applied to the state of step %d in %.2f s", self.reached - first, first, seconds)
        return states

    # -- private

    def _bring(self, steps: Sequence[int]) -> list[list[_Brought]] | None:
        """Bring each chain's records of these steps; return the steps before the first that is damaged on any rank.

        Adds reasons to `self.reasons`. Returns `None` if a rank could not be served at all. Collective.
        """
        brought = [[_Brought(step, links[step]) for step in steps] for links in self._chains]
        flat = [each for own in brought for each in own]
        if not self._transfer.fill([each.assembly for each in flat if each.assembly is not None], ""):
            return None
        said = self._transport.gather_values([[each.step, why] for each in flat if (why := each.check())])
        self.reached = steps[-1]
        self._end(said)
        good = [own[: self.reached + 1 - steps[0]] for own in brought]
        for each in (each for own in good for each in own):
            self.supplied += each.supplied
        return good

    def _end(self, said: Sequence[Any]) -> None:
        """End before the first bad step; each rank has said its bad steps, and why."""
        bad = [(step, f"rank {rank}: {why}") for rank, rows in enumerate(said) for step, why in rows]
        self.reached = min([self.reached, *(step - 1 for step, _ in bad)])
        whys = [why for step, why in bad if step == self.reached + 1]
        self.reasons += [f"step {self.reached + 1} is bad, and what follows on it of no use: {why}" for why in whys]


def restore_chain(attempt: RestoreAttempt, marker: RankMarker) -> tuple[Restored | None, list[str]]:
    """Return this rank's part of the last good boundary of a chain, and the reasons why it ends earlier. Collective.
    The attempt is at the chain's last version, with its marker.
    """
    transport, transfer, links = attempt.chain()
    chain = ChainRestore(transport, transfer, [links], marker.generation.step)
    if (states := chain.run()) is None:
        return None, chain.reasons
    (state,), base = states, links[states[0].step][0].entry
    restored = Restored(
        marker=full_state(marker, base, chain.reached),
        segments=[state.segment],
        layouts=[state.layout],
        nbytes=dict(chain.supplied),
        chosen=RestorePlan(),
    )
    return restored, chain.reasons


def folded(marker: RankMarker, read: Read) -> tuple[RankMarker, Tensor]:
    """Return a rank's part of a generation of differences as a full state: a marker without differences, and the bytes
    of its only file. The given marker, from storage, names the whole chain. Raises `Corrupt` if a link is bad or
    missing.
    """
    links = {link.entry.step: [link] for link in named_links(marker, [stored(_OWN, marker.rank)], is_base=False)}
    first, last = base_step(links, marker.generation.step), marker.generation.step
    if first is None:
        raise Corrupt(f"{marker.generation}: what it follows on is not all named. Another generation may be whole.")
    brought = [_Brought(step, links[step]) for step in range(first, last + 1)]
    for each in brought:
        if each.assembly is not None:
            each.assembly.fill(read)
        if why := each.check():
            raise Corrupt(f"{marker.generation}: step {each.step}, on which it follows, is bad: {why}")
    state = brought[0]
    for steps in _portions(range(1, len(brought))):
        fold(state.segment, state.layout, [brought[index].difference for index in steps])
    state.layout.write_header(state.segment)
    base = links[first][0].entry
    records = RecordRows(base.records).digested_with_file(memoryview(state.segment.numpy()))[0]  # type: ignore[arg-type]
    return full_state(marker, replace(base, records=records), last), state.segment


_OWN = Version(GenerationId(step=0, incarnation=0, nonce=""), "")
"""Placeholder for the version of files whose keys say where they are."""


class _Brought:
    """One boundary on its way into memory."""

    def __init__(self, step: int, sources: Sequence[LinkSource]) -> None:
        self.step, self._why = step, ""
        self.assembly: Assembly | None = None
        self.journal: Journal = {}
        try:
            self.layout: SegmentLayout = stored_layout([sources[0].entry])
            self.segment: Tensor = host_buffer(self.layout.nbytes)
            wanted = neighbours([sources[0].entry], self.layout, sources[0].copies)
            assert wanted is not None, "a layout is that of its own entry"
            for source in sources[1:]:
                for each, other in zip(
                    wanted, neighbours([source.entry], self.layout, source.copies) or (), strict=False
                ):
                    each.places = [*each.places, *other.places]
            self.assembly = Assembly(f"records of step {step}", self.segment, wanted, may_be_lost=True)
        except CheckpointError as error:
            self._why = str(error)

    @property
    def supplied(self) -> Counter[Replica]:
        """Bytes read, by copy."""
        return Counter() if self.assembly is None else self.assembly.supplied

    def check(self) -> str:
        """Return why this step's records cannot be used, or an empty string. Also decodes `self.journal`."""
        if self.assembly is None or self.assembly.lost:
            return self._why or (self.assembly.lost if self.assembly is not None else "")
        try:
            self.journal = decode_journal(self.layout.view(self.segment, JOURNAL))
        except Corrupt as error:
            return str(error)
        return ""

    @property
    def difference(self) -> Difference:
        """The records as a difference to the boundary before."""
        return Difference(self.segment, self.layout, self.journal)


def _portions(steps: range, size: int = AT_ONCE) -> Iterator[range]:
    return (steps[at : at + size] for at in range(0, len(steps), size))


def full_state(marker: RankMarker, base: SegmentEntry, step: int) -> RankMarker:
    """Return the marker of a full state at boundary `step`, in the file of `base`."""
    record = PlanRecord.from_json(str(marker.policy["plan"]))
    whole = replace(record, plan=Plan.of_everything(record.plan.names))
    return replace(
        marker,
        generation=replace(marker.generation, step=step),
        plan_hash=whole.plan_hash,
        policy={**marker.policy, "plan": whole.to_json()},
        segments=(replace(base, step=step),),
        referenced=(),
    )


# -- applying

_FULL, _DELTA = f"{RecordKind.FULL.value}/", f"{RecordKind.DELTA.value}/"
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_COUNT = "step"


@dataclass(frozen=True, eq=False, slots=True)
class Difference:
    """Difference between one boundary and the next, on one rank."""

    segment: Tensor
    """uint8."""
    layout: SegmentLayout
    journal: Journal

    def view(self, name: str) -> Tensor:
        """Return a tensor by its name in the file."""
        return self.layout.view(self.segment, name)


def fold(state_U8: Tensor, layout: SegmentLayout, differences: Sequence[Difference]) -> None:
    """Turn this rank's full segment of a boundary into a later boundary's state, in place, by at least one difference,
    without a gap, oldest first. Raises `Corrupt` if they do not fit the state, which may have been changed.
    """
    newest = differences[-1]
    try:
        for part, names in groupby(layout.names, lambda name: name.rpartition("/")[0]):
            if part.startswith(_FULL):
                _fold_part(state_U8, layout, part.removeprefix(_FULL), [*names], differences)
            else:  # buffers and journal
                for name in names:
                    layout.view(state_U8, name).copy_(newest.view(name))
    except (LookupError, ValueError, RuntimeError) as error:
        raise Corrupt(f"differences do not fit the state that they follow on ({error!r}).") from error


def _fold_part(
    state_U8: Tensor, layout: SegmentLayout, part: str, names: Sequence[str], differences: Sequence[Difference]
) -> None:
    """Apply the differences of one shard, in place; `names` are its tensors in the state, `part` their common prefix."""
    newest = differences[-1]
    packed = f"{_DELTA}{part}/{PACKED}"
    gradient = packed if packed in newest.layout.spans else f"{_DELTA}{part}/{GRADIENT}"
    live = {name.rpartition("/")[2]: layout.view(state_U8, name) for name in names}
    if gradient not in newest.layout.spans:
        for key, tensor in live.items():
            tensor.copy_(newest.view(f"{_DELTA}{part}/{key}"))
        return
    for key in filter(is_average, live):
        live[key].copy_(newest.view(f"{_DELTA}{part}/{key}"))
    fqn, count = part.rpartition("/")[0], live[_COUNT]
    steps: list[AdamStep] = []
    for difference in differences:
        if (settings := step_settings(difference.journal, fqn)) is not None:
            number = int(count) + len(steps) + 1
            found = difference.view(gradient)
            steps.append(
                settings.step(unpack_gradient(found, live[PARAM].numel()) if gradient == packed else found, number)
            )
    state = AdamState(live[PARAM], *(live[key] for key in _MOMENTS if key in live))
    for _, alike in groupby(steps, attrgetter("kernel")):
        replay_adam(state, list(alike))
    if steps:
        count += len(steps)
        live[PRESENT].fill_(1)
