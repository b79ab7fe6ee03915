"""What an incarnation resumes from: a generation that every rank could read, with the bytes of this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError, Corrupt, IdentityMismatch
from lightning_moe_ckpt.journal import Journal, decode_journal
from lightning_moe_ckpt.recovery._attempt import Restored, RestorePlan
from lightning_moe_ckpt.snapshot import JOURNAL, SEGMENT_METADATA, PlanRecord
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry, SegmentLayout, TensorSpec, dtype_of
from lightning_moe_ckpt.tiers import TierName


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Around the reading of values that a stored document may hold anything in. Raises `Corrupt` where they are no such."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Corrupt(
            f"{what} is not one that this release reads ({error!r}). Resume with the release that wrote it."
        ) from error


def stored_layouts(marker: RankMarker) -> list[SegmentLayout]:
    """Layouts of the records that a marker says are there, by step, in their order in the files.

    Raises:
        Corrupt: no segment has such records.
    """
    by_step: dict[int, list[SegmentEntry]] = {}
    for entry in marker.segments:
        by_step.setdefault(entry.step, []).append(entry)
    return [_stored_layout(by_step[step]) for step in sorted(by_step)]


def _stored_layout(files: Sequence[SegmentEntry]) -> SegmentLayout:
    records = [record for each in files for record in sorted(each.records, key=lambda record: record.offset)]
    # Buffers are stored whole, of anything else there is a flat piece.
    shapes = [record.global_shape if record.kind == "buffer" else (record.numel,) for record in records]
    where = ", ".join(each.key for each in files)
    try:
        specs = [
            TensorSpec(each.name, dtype_of(each.dtype), shape) for each, shape in zip(records, shapes, strict=True)
        ]
        layout = SegmentLayout(specs, metadata=SEGMENT_METADATA)
    except ValueError as error:
        raise Corrupt(f"{where}: its marker describes no segment ({error}). Another copy may be good.") from error
    if layout.nbytes > sum(each.nbytes for each in files):
        raise Corrupt(f"{where}: its marker has records that overlap. Another copy may be good.")
    return layout


def journal_capacity(marker: RankMarker) -> int:
    """Bytes that a marker says were kept for each journal."""
    return next(record.nbytes for record in marker.segments[0].records if record.name == JOURNAL)


@dataclass(kw_only=True)
class RestoreSource:
    """A generation that every rank could read, with this rank's bytes."""

    generation: GenerationId
    policy: Mapping[str, Any]
    steps: Sequence[int]
    segments: list[Tensor]
    """One uint8 tensor per step, laid out as `layouts` says."""
    layouts: list[SegmentLayout]
    nbytes: Mapping[TierName, int]
    """Bytes of this rank, by where they were read."""
    committed: bool
    """Whether it is in storage; if not, it is in memory only."""
    chosen: RestorePlan
    """Where experts are from that are of other generations."""
    tokens: Mapping[GenerationId, Tensor]
    """Tokens behind the experts of those generations, see `tokens_behind`."""

    @classmethod
    def of(cls, part: Restored, tokens: Mapping[GenerationId, Tensor], *, committed: bool) -> RestoreSource:
        """What was put together."""
        nbytes = Counter[TierName]()
        for copy, count in part.nbytes.items():
            nbytes[copy.source] += count
        return cls(
            generation=part.marker.generation,
            policy=part.marker.policy,
            steps=sorted(set(part.marker.steps)),
            segments=part.segments,
            layouts=part.layouts,
            nbytes=nbytes,
            committed=committed,
            chosen=part.chosen,
            tokens=tokens,
        )

    @property
    def restored_from(self) -> dict[str, int]:
        """Bytes of this rank, by the name of where they were read."""
        return {str(source): count for source, count in self.nbytes.items()}

    @property
    def tiers(self) -> dict[str, int]:
        """Its step, by the tiers that are known to hold this rank's part of it."""
        return dict.fromkeys([*self.nbytes, *(["storage"] if self.committed else [])], self.generation.step)

    @property
    def plan(self) -> PlanRecord:
        """The stored plan, see `lay_out`. Raises `Corrupt` if it is none."""
        with understood(f"{self.generation}: its plan"):
            return PlanRecord.from_json(self.policy["plan"])

    @property
    def first_step(self) -> int:
        """The boundary of slot 0."""
        return self.steps[0]

    @property
    def journal_nbytes(self) -> int:
        """Capacity of the journal record."""
        return self.layouts[0].spans[JOURNAL].nbytes

    @property
    def start(self) -> Journal:
        """What the run was at the boundary of slot 0 when the next batch began."""
        start: Journal = decode_journal(self.layouts[0].view(self.segments[0], JOURNAL))["start"]
        return start

    def check_headers(self, expected: Sequence[SegmentLayout]) -> None:
        """The bytes must lie where this model, plan and world put them.

        Raises:
            IdentityMismatch: they do not.
        """
        for step, found, wanted in zip(self.steps, self.layouts, expected, strict=True):
            if found.header != wanted.header:
                raise IdentityMismatch(
                    f"{self.generation}, segment of step {step}: its records are not those this model, optimizer and "
                    "world give. Resume with the code that wrote it, or start anew with resume='never'."
                )
