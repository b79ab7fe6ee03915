"""Load a restored generation into the live model: everything at once, or the first step of a sparse window.

Ranks put a partial generation together from any places into one segment that looks as if taken at once, with each
expert's shards as cut in its own generation. So it is loaded like any other: each record is read by its writer and
broadcast to the other holders. Its cost is the tokens behind the experts that are older than the rest: the ledger goes
on from there, and a log line has it.

Source: PEC/MoC (2024), Sec. 3, for the cost in tokens; the ledger is in `policies`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError, Corrupt, IdentityMismatch
from lightning_moe_ckpt.journal import Journal, decode_journal
from lightning_moe_ckpt.launch import RerunRequest
from lightning_moe_ckpt.native import Column, CopyEngine
from lightning_moe_ckpt.operators import Box, Operator, OperatorSet, RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import NEVER, PEER, TokenLedger, expert_names
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, Restored, RestorePlan, ShardSource
from lightning_moe_ckpt.recovery._frozen import Frozen
from lightning_moe_ckpt.recovery._index import spelled_names
from lightning_moe_ckpt.recovery._replay import Replay
from lightning_moe_ckpt.snapshot import (
    JOURNAL,
    SEGMENT_METADATA,
    FileLayout,
    Identity,
    PlanRecord,
    Shard,
    StateView,
    StepLayout,
    Topology,
    WindowLayout,
    lay_out,
)
from lightning_moe_ckpt.storage import (
    GenerationId,
    KindColumns,
    NameColumns,
    Numbered,
    RankMarker,
    RecordColumns,
    SegmentEntry,
    SegmentLayout,
    TensorKind,
    Texts,
    dtype_of,
    lacking_memory,
)

log = rank_logger(__name__)

TokensByGeneration = Mapping[GenerationId, Tensor]
"""Tokens behind the experts of each supplying generation, int64 `[E]`; without generations that counted none."""

_MOST_PER_ELEMENT = 64
"""Most bytes per parameter in a segment, of state and averages: several times the bytes of known optimizers."""
_ROOM_NBYTES = 64 * 2**20
"""Bytes for a header and alignment."""


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Raise `Corrupt` if the body fails on values of a stored document, where anything may stand."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Corrupt(
            f"{what} is not one that this release reads ({error!r}). Resume with the release that wrote it."
        ) from error


def stored_layouts(marker: RankMarker) -> list[SegmentLayout]:
    """Return the layouts of a marker's records, by step, in the files' order. Raises `Corrupt` if no segment has such records."""
    by_step: dict[int, list[SegmentEntry]] = {}
    for entry in marker.segments:
        by_step.setdefault(entry.step, []).append(entry)
    return [stored_layout(by_step[step]) for step in sorted(by_step)]


def stored_layout(files: Sequence[SegmentEntry]) -> SegmentLayout:
    """Return the record layout of one step, in the files' order. Raises `Corrupt`."""
    tables = [RecordColumns.of(file.records).by_offset() for file in files]
    where = ", ".join(file.key for file in files)
    try:
        # Headers are not rebuilt: names and kinds say the same.
        header_nbytes = min((each.offset[0] for each in tables[:1] if each.offset), default=0)
        layout = SegmentLayout.of_columns(
            _names_of(tables), _kinds_of(tables), metadata=SEGMENT_METADATA, header_nbytes=header_nbytes
        )
    except ValueError as error:
        raise Corrupt(f"{where}: its marker describes no segment ({error}). Another copy may be good.") from error
    if layout.nbytes > sum(file.nbytes for file in files):
        raise Corrupt(f"{where}: its marker has records that overlap. Another copy may be good.")
    return layout


_LOCAL = 64
"""Last records of a file, buffers and the journal among them, whose names are looked up."""


def _names_of(tables: Sequence[RecordColumns]) -> list[NameColumns]:
    names, known = tables[0].name, spelled_names(tables)
    if len(tables) > 1 or not isinstance(names, Texts) or b'"__' in known:  # they may repeat, or be reserved
        return [NameColumns.of([*chain.from_iterable(table.name for table in tables)])]
    cuts = sorted({0, max(0, len(names) - _LOCAL), len(names)})
    return [
        NameColumns(stop - start, lambda part=slice(start, stop): names[part], known=names.between(start, stop))  # type: ignore[misc]
        for start, stop in pairwise(cuts)
    ]


def _kinds_of(tables: Sequence[RecordColumns]) -> KindColumns:
    """Return the kinds of records: buffers are stored whole, all else in flat pieces."""
    distinct, numbers = list[TensorKind](), list[Column]()
    for table in tables:
        dtypes, lengths = Numbered.of(table.dtype), Numbered.of(table.numel)
        pair = dtypes.number * len(lengths.distinct) + lengths.number
        there = np.bincount(pair) > 0
        number = len(distinct) + (np.cumsum(there) - 1)[pair]
        pairs = [divmod(each, len(lengths.distinct)) for each in np.flatnonzero(there).tolist()]
        distinct += [(dtype_of(dtypes.distinct[dtype]), (lengths.distinct[length],)) for dtype, length in pairs]
        for row in _rows_of(table, "buffer"):
            number[row] = len(distinct)
            distinct.append((dtype_of(table.dtype[row]), table.global_shape[row]))
        numbers.append(number)
    return KindColumns(distinct, np.concatenate(numbers))


def _rows_of(table: RecordColumns, kind: str) -> list[int]:
    kinds = Numbered.of(table.kind)
    return np.flatnonzero(kinds.number == kinds.distinct.index(kind)).tolist() if kind in kinds.distinct else []


def journal_capacity(marker: RankMarker) -> int:
    """Return a marker's bytes per journal record."""
    return _journals(marker.segments[0])[0]


def _journals(file: SegmentEntry) -> list[int]:
    """Return the sizes in bytes of the journals in a file."""
    columns = RecordColumns.of(file.records)
    return [columns.nbytes[row] for row in _rows_of(columns, JOURNAL) if columns.name[row] == JOURNAL]


def misfit(marker: RankMarker, view: StateView) -> str | None:
    """Return why segments are larger than this rank's could be, or than memory; `None` if they fit."""
    numel = sum(tensor.numel() for tensor in view.params.values())
    buffers = sum(b.nbytes for name in view.buffer_names if (b := view.buffer(name)) is not None)
    whole = sum(map(view.whole_nbytes, view.params)) if view.schema.keeps_whole else 0
    most = _ROOM_NBYTES + _MOST_PER_ELEMENT * numel + 2 * (buffers + whole)
    for segment in {each.step: each for each in reversed(marker.segments)}.values():  # the durable files
        journals = _journals(segment)
        if len(journals) != 1:
            return f"{segment.key}: has {len(journals)} journals, 1 was expected"
        if segment.nbytes - journals[0] > most:
            return f"{segment.key}: has {segment.nbytes} bytes, a segment of this model at most {most} and its journal"
    lack = lacking_memory(sum(segment.nbytes for segment in marker.segments))
    return None if lack is None else f"{', '.join(segment.key for segment in marker.segments)}: {lack}"


def read_journals(layouts: Sequence[SegmentLayout], segments: Sequence[Tensor]) -> list[Journal]:
    """Return the journals of a generation, step by step. Raises `Corrupt` if any of them cannot be read."""
    journals = [decode_journal(layout.view(each, JOURNAL)) for layout, each in zip(layouts, segments, strict=True)]
    for journal in journals:
        if {"start", "outcome"} - journal.keys():
            raise Corrupt(f"its journal holds {sorted(journal)} only")
    return journals


class Retold(NamedTuple):
    """A rank's journal, made from those of all ranks that wrote a generation."""

    journal: Journal
    notes: Sequence[str]
    """Differences from what was, in words."""


class JournalReader(NamedTuple):
    """Uses that a trainer makes of stored journals."""

    as_user: Callable[[Journal], None] = lambda _: None
    """See `Replay`."""
    retell: Callable[[Sequence[Journal], Topology], Retold] = lambda journals, _: Retold(journals[0], ())
    """Makes this rank's journal from those of all ranks that wrote a boundary, by rank, and their topology."""


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """The job to resume, with its identity to compare with the stored run's."""

    identity: Identity
    view: StateView
    groups: ParallelGroups
    may_lack_experts: bool = False
    """Whether experts without a good copy may begin anew, if no whole generation is left."""
    only_tag: str = ""
    """Tag of the only run that may be resumed, see `SessionConfig.densify`; empty for any."""
    rerun: RerunRequest | None = None
    """See `SessionConfig.rerun`."""
    elastic: bool = False
    """Whether other ranks, or ranks in another layout, may have written the generation."""
    period_steps: int = 0
    """Steps between generations by the user's number or the default; further back no generation takes a newer one's place."""
    journals: JournalReader = field(default_factory=JournalReader)


@dataclass(kw_only=True)
class RestoreSource:
    """A generation that every rank could read, with this rank's bytes."""

    generation: GenerationId
    policy: Mapping[str, Any]
    steps: Sequence[int]
    segments: list[Tensor]
    """A uint8 tensor per step, laid out by `layouts`."""
    layouts: list[SegmentLayout]
    restored_from: dict[str, int]
    """Bytes of this rank, by the tier from which they were read."""
    committed: bool
    """Whether storage has the generation; if not, only memory has."""
    chosen: RestorePlan
    """Sources of experts from other generations."""
    tokens: TokensByGeneration
    journals: list[Journal]
    """Journals of the steps."""
    recut: bool = False
    """Whether other ranks wrote the generation: nothing that these ranks store builds on it, their next is stored whole."""

    @classmethod
    def of(
        cls, part: Restored, journals: list[Journal], tokens: TokensByGeneration, *, committed: bool
    ) -> RestoreSource:
        """Return a rank's restored generation after its attempt."""
        restored_from = Counter[str]()
        for copy, count in part.nbytes.items():
            restored_from[copy.source] += count
        return cls(
            generation=part.marker.generation,
            policy=part.marker.policy,
            steps=sorted(set(part.marker.steps)),
            segments=part.segments,
            layouts=part.layouts,
            restored_from=dict(restored_from),
            committed=committed,
            chosen=part.chosen,
            tokens=tokens,
            journals=journals,
        )

    @property
    def tiers(self) -> dict[str, int]:
        """The generation's step, by the tiers known to hold this rank's part."""
        return dict.fromkeys([*self.restored_from, *(["storage"] if self.committed else [])], self.generation.step)

    @property
    def start(self) -> Journal:
        """Start half of the first boundary's journal."""
        start: Journal = self.journals[0]["start"]
        return start

    @property
    def first_step(self) -> int:
        """The boundary of the window's first step."""
        return self.steps[0]

    @property
    def journal_nbytes(self) -> int:
        """Capacity of the journal record in bytes."""
        return self.layouts[0].span(JOURNAL).nbytes

    def check_layouts(self, expected: Sequence[SegmentLayout]) -> None:
        """Raise `IdentityMismatch` if the segments are not laid out as this model, plan and world require; else keep these."""
        for step, found, wanted in zip(self.steps, self.layouts, expected, strict=True):
            if not found.is_like(wanted):
                raise IdentityMismatch(
                    f"{self.generation}, segment of step {step}: its records are not those this model, optimizer and "
                    "world give. Resume with the code that wrote it, or start anew with resume='never'."
                )
        self.layouts = [*expected]


def replay_of(
    found: RestoreSource,
    view: StateView,
    groups: ParallelGroups,
    exchange: Exchange,
    engine: CopyEngine,
    *,
    frozen: Callable[..., Frozen],
    as_user: Callable[[Journal], None],
) -> tuple[WindowLayout, Replay]:
    """Return a verified generation's layout, and its replay, for `load_found`; its first records are on their way to
    all ranks. Collective. For `frozen` and `as_user` see `Replay`. Raises `IdentityMismatch` if the segments are not
    laid out as this model, plan and world require; `Corrupt` if the plan cannot be read.
    """
    as_user(found.start)  # first: the optimizer's groups decide which records there are
    view.fit_buffers(dict(zip(found.layouts[0].names, found.layouts[0].kinds, strict=True)))
    layout = _layout_of(found, view, groups, exchange)
    replay = Replay(
        window=layout,
        groups=groups,
        segments=found.segments,
        journals=found.journals,
        first_step=found.first_step,
        frozen=frozen,
        engine=engine,
        as_user=as_user,
        missing=found.chosen.missing,
    )
    replay.share_seen(exchange)
    replay.fetch(found.first_step)
    return layout, replay


def load_found(found: RestoreSource, replay: Replay, operators: OperatorSet) -> None:
    """Load the first step, and buffers; bring the token ledger in the replay's first journal up to date. Collective."""
    replay.load(found.first_step)
    replay.load_buffers()
    note_recovery(found.generation, found.chosen, found.tokens, replay.journals[0]["outcome"], operators)


def follow_found(found: RestoreSource, view: StateView, groups: ParallelGroups, exchange: Exchange) -> WindowLayout:
    """Return a restored generation's layout; load nothing. Collective."""
    layout = _layout_of(found, view, groups, exchange)
    exchange.gather_values([])  # as ranks that load do
    return layout


def _layout_of(found: RestoreSource, view: StateView, groups: ParallelGroups, exchange: Exchange) -> WindowLayout:
    with understood(f"{found.generation}: its plan"):
        record = PlanRecord.from_json(found.policy["plan"])
        layout = restored_window(record, found.chosen, view, groups, found.journal_nbytes)
    with exchange.raise_together(IdentityMismatch):  # each rank has its own records
        found.check_layouts([step.durable.segment for step in layout.steps])
    return layout


def restored_window(
    record: PlanRecord, chosen: RestorePlan, view: StateView, groups: ParallelGroups, journal_nbytes: int
) -> WindowLayout:
    """Return the layout of a restored state: its generation's, with experts cut as in their own generations. Raises `IdentityMismatch` if
    the plan is for other experts.
    """
    window = lay_out(record, view, groups, journal_nbytes)
    if not chosen.is_partial:
        return window
    shards = {
        region: [part for part in parts if view.operators[part.operator].kind != "expert"]
        for region, parts in window.steps[0].durable.shards.items()
    }
    for name, sources in chosen.shards.items():
        if name in view.operators:  # else it is on other ranks
            operator = view.operators[name]
            for source in sources:
                box = view.boxes.get(source.fqn)
                region = tuple(groups.ranks(operator.holders)) if box is None else box.holders
                if source.writer in region:
                    shards.setdefault(region, []).append(_shard(operator, source, box))
    return WindowLayout(record=record, steps=[StepLayout(FileLayout(shards, view, groups, journal_nbytes))])


def _shard(operator: Operator, source: ShardSource, box: Box | None) -> Shard:
    for whole in operator.slices:
        first, begin, numel = whole.global_start, whole.start, whole.numel
        if box is not None:
            shift = whole.global_start - whole.start
            first, begin, numel = box.first + shift if box.bounds is None else 0, 0, box.numel
        at = source.global_start - first
        if whole.fqn == source.fqn and 0 <= at <= numel - source.numel:
            start, bounds = begin + at, None if box is None else box.bounds
            stop = start + source.numel
            piece = replace(whole, start=start, stop=stop, global_start=source.global_start, box=bounds)
            return Shard(operator=operator.name, kind=RecordKind.FULL, slice=piece, writer=source.writer)
    raise IdentityMismatch(
        f"`{source.fqn}`: elements from {source.global_start} on are not of {operator.name}, as the run has it. "
        "Resume with the code that wrote it, or start anew with resume='never'."
    )


# -- the cost in tokens


def tokens_behind(attempt: RestoreAttempt, chosen: RestorePlan) -> TokensByGeneration:
    """Read the tokens behind the chosen experts from journals. Collective."""
    read = attempt.read_common(set(chosen.generations.values()), JOURNAL, _alive)
    return {each: alive_E for each, alive_E in read.items() if alive_E.numel()}


def _alive(record: memoryview) -> Tensor:
    """Return the tokens per expert in the live weights of a journal's boundary, int64 `[E]`; empty if none were counted."""
    stored = decode_journal(torch.frombuffer(bytearray(record), dtype=torch.uint8))["outcome"].get("accounting")
    return torch.empty(0, dtype=torch.int64) if stored is None else TokenLedger.from_journal(stored).alive


def note_recovery(
    generation: GenerationId, chosen: RestorePlan, tokens: TokensByGeneration, outcome: Journal, operators: OperatorSet
) -> None:
    """Bring a generation's journal up to date, in its outcome half: tokens as of now, and bad copies; log both.

    Without partial sources in `chosen` nothing is noted.
    """
    if not chosen.is_partial:
        return
    names = [name for layer in operators.layers for name in expert_names(layer)]
    ledger, lost = None, dict[str, int]()
    if (stored := outcome.get("accounting")) is not None:
        ledger, lost_E = _restore(TokenLedger.from_journal(stored), names, chosen, tokens)
        outcome["accounting"], outcome["lost"] = ledger.to_journal(), lost_E
        lost = dict(zip(names, lost_E.tolist(), strict=True))
    outcome["bad"] = {name: frozenset(each for each, here in bad.items() if here) for name, bad in chosen.bad.items()}
    _log_experts(names, chosen, lost)
    _log_cost(generation, chosen, ledger, sum(lost.values()))


def _restore(
    ledger: TokenLedger, names: Sequence[str], chosen: RestorePlan, tokens: TokensByGeneration
) -> tuple[TokenLedger, Tensor]:
    """Return the ledger to go on with, and int64 `[E]`: tokens lost by this recovery."""
    sources = [chosen.generations.get(name) for name in names]
    alive = [_tokens_of(expert, source, tokens, ledger) for expert, source in enumerate(sources)]
    levels = [_levels(chosen.levels.get(name, frozenset()), ledger) for name in names]
    read_from = {level: torch.tensor([level in each for each in levels]) for level in ledger.saved}
    steps = torch.tensor([NEVER if each is None else each.step for each in sources], dtype=torch.int64)
    return ledger.restore(torch.tensor(alive, dtype=torch.int64), steps, read_from)


def _tokens_of(expert: int, source: GenerationId | None, tokens: TokensByGeneration, ledger: TokenLedger) -> int:
    """Return the tokens in a generation's copy of `expert` (place over all layers); 0 without a copy.

    If nobody can read the generation's journal, the ledger has its tokens, provided it is the expert's newest copy.
    """
    if source is None:
        return 0
    if source in tokens:
        return int(tokens[source][expert])
    # Uncounted tokens count as not alive.
    return ledger.tokens_at(expert, source.step) or 0


def _levels(held: frozenset[str], ledger: TokenLedger | None) -> frozenset[str]:
    """Return the ledger's levels that hold all of a copy, from a `RestorePlan`'s levels."""
    if ledger is None or PEER not in ledger.saved:
        return held
    # The ledger counts copies on other nodes apart, so memory is the own node's.
    return (held - {"memory"}) | ({"memory"} if "host" in held else set())


def _log_experts(names: Sequence[str], chosen: RestorePlan, lost: Mapping[str, int]) -> None:
    """Log one line for each expert that lost a copy."""
    for name in [each for each in names if each in chosen.bad and each in chosen.generations]:
        log.warning(
            "%s: its copy of %s is bad, %s is taken; tokens lost: %s",
            *(name, " and of ".join(map(str, chosen.bad[name])), chosen.generations[name]),
            lost.get(name, "not counted"),
        )
    for name, why in chosen.missing.items():
        log.warning(
            "%s is lost: it begins anew, with the weights that the model starts with and without optimizer state; tokens "
            "lost: %s; its copies: %s",
            *(name, lost.get(name, "not counted"), why),
        )


def _log_cost(generation: GenerationId, chosen: RestorePlan, ledger: TokenLedger | None, lost: int) -> None:
    """Log one line: ages and places of experts, and the cost in tokens."""
    ages = Counter(generation.step - each.step for each in chosen.generations.values())
    levels = [_levels(chosen.levels.get(name, frozenset()), ledger) for name in chosen.generations]
    places = Counter("memory" if "memory" in level else "/".join(sorted(level)) or "several places" for level in levels)
    cost = "its tokens were not counted"
    if ledger is not None:
        in_force = "" if ledger.k is None else f", K {ledger.k}"
        cost = f"{lost} tokens lost, PLT {ledger.plt:.4%}{in_force}"
    log.info(
        "%s is partial: %d experts (%s; from %s); %s",
        generation,
        len(chosen.generations),
        ", ".join(f"{number} of {age} steps ago" for age, number in sorted(ages.items())),
        ", ".join(f"{place}: {number}" for place, number in sorted(places.items())),
        cost,
    )


_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables in which launchers count earlier starts of a job."""


def warn_of_a_restart(url: str) -> None:
    """Warn that a run begins anew although the launcher has started this job before."""
    for name in _RESTART_COUNTS:
        count = os.environ.get(name, "")
        if count.isdigit() and int(count) > 0:
            log.warning(
                "%s: training begins from nothing, although %s=%s says that this job was started before. If it had stored "
                "anything, check the URL",
                *(url, name, count),
            )
            return
