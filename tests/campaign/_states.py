"""What the state was at every boundary of a run, and what generations in memory and storage say it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from door import as_memoryview
from lightning.pytorch import Callback, LightningModule, Trainer
from stored._segments import read_segment
from torch import Tensor
from typing_extensions import override

from campaign._training import Setup, quiet
from lightning_moe_ckpt.callbacks import PartialExpertCheckpoint, SelectiveExpertCheckpoint
from lightning_moe_ckpt.journal import decode_journal
from lightning_moe_ckpt.operators import LoadCounter, StateSchema, discover
from lightning_moe_ckpt.policies import Plan
from lightning_moe_ckpt.snapshot import PlanRecord
from lightning_moe_ckpt.storage import Commit, RankMarker, RecordEntry, RunStore, SegmentEntry, open_backend
from lightning_moe_ckpt.testing import Attempt
from lightning_moe_ckpt.tiers import HostTier

Key = tuple[str, str, str]
"""Operator, parameter, state."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One generation of one rank, as some tier has it."""

    tier: str
    rank: int
    step: int
    plan: Plan
    records: list[tuple[RecordEntry, Tensor]]
    """Whole states, with their bytes."""
    journal: dict[str, Any]
    marker: RankMarker
    file: Tensor
    """uint8, all bytes of the segment."""
    whole: bool
    """Whether everything that was taken is there, and not some experts only."""

    @property
    def experts(self) -> set[str]:
        """Operators of experts that are in it."""
        return {record.operator for record, _ in self.records if "/expert." in record.operator}


class StateRecorder(Callback):
    """Keeps the state of this rank at every boundary, and copies of its generations in memory at the end.

    Args:
        own: the checkpoint callback.
        folder: where both go.
        rank: this rank.
        ep_size: expert parallelism.
        wait: whether storage gets every generation: each step waits for the one before.
    """

    def __init__(
        self,
        own: PartialExpertCheckpoint | SelectiveExpertCheckpoint,
        folder: Path,
        rank: int,
        *,
        ep_size: int,
        wait: bool = True,
    ) -> None:
        self._own, self._folder, self._rank, self._ep_size, self._wait = own, folder, rank, ep_size, wait
        self._states: dict[int, dict[Key, tuple[int, Tensor]]] = {}
        self._tokens: dict[int, Tensor] = {}
        self._counter: LoadCounter | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counter = LoadCounter(discover(pl_module, ep_size=self._ep_size), pl_module)
        self._counter.install()
        self._keep(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self._wait:
            assert self._own.wait_committed()
        self._keep(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._counter is not None
        self._counter.remove()
        assert self._own.memory_tag is not None
        torch.save(self._states, self._folder / f"states.{self._rank}")
        torch.save(self._tokens, self._folder / f"tokens.{self._rank}")
        tier = HostTier(self._own.memory_tag)
        copies = []
        for holding in tier.holdings():
            if holding.owner == self._rank:
                marker = tier.read_marker(holding)
                buffer = torch.empty(sum(segment.nbytes for segment in marker.segments), dtype=torch.uint8)
                for entry in marker.segments:
                    # Of a generation that newer ones replace some experts are left, and nothing between them.
                    spans = [(0, entry.nbytes)] if holding.whole else [(r.offset, r.nbytes) for r in entry.records]
                    file = as_memoryview(file_of(marker, entry, buffer))
                    for start, nbytes in spans:
                        tier.read_into(holding, entry, start, file[start : start + nbytes])
                copies.append([marker.to_bytes(), buffer, holding.whole])
        torch.save(copies, self._folder / f"memory.{self._rank}")
        tier.close()

    def _keep(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._counter is not None
        self._tokens[trainer.global_step] = self._counter.read_and_reset()
        self._states[trainer.global_step] = state_of(pl_module, trainer.optimizers[0], self._ep_size)


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer, ep_size: int) -> dict[Key, tuple[int, Tensor]]:
    """Everything on this rank by operator, flat, with the place of its first element in the global tensor."""
    params, schema = dict(module.named_parameters()), StateSchema.of(optimizer)
    found: dict[Key, tuple[int, Tensor]] = {}
    for op in discover(module, ep_size=ep_size):
        for piece in op.slices:
            param = params[piece.fqn]
            state = {"param": param.detach(), **schema.optimizer.state.get(param, {})}
            for key, value in state.items():
                flat = value.reshape(-1)
                cut = flat[piece.start : piece.stop] if value.shape == param.shape else flat
                found[op.name, piece.fqn, key] = piece.global_start, cut.clone()
    return found


def train_recorded(setup: Setup, life: Attempt, *, wait: bool = True) -> Mapping[str, Any]:
    """Train once, with everything written down."""
    quiet()
    torch.manual_seed(life.seed)
    assert setup.checkpointing is not None
    own = setup.checkpointing.make(life.url)
    assert isinstance(own, PartialExpertCheckpoint | SelectiveExpertCheckpoint)
    own.untouched = ("callback.StateRecorder.*",)  # as large as the model at every step
    recorder = StateRecorder(own, life.workdir, life.rank, ep_size=setup.expert_parallel, wait=wait)
    trainer = Trainer(callbacks=life.callbacks(recorder, own), **setup.trainer_options(life))
    trainer.fit(setup.make_module(life), *setup.loaders(life))
    report = own.report
    return {"nbytes_per_step": report.nbytes_per_step, "dense_nbytes": report.dense_nbytes}


def recorded(setup: Setup, *, wait: bool = True) -> Any:
    """`train_recorded` for a life."""
    return partial(train_recorded, setup, wait=wait)


def states(folder: Path, rank: int) -> dict[int, dict[Key, tuple[int, Tensor]]]:
    """By step."""
    found: dict[int, dict[Key, tuple[int, Tensor]]] = torch.load(folder / f"states.{rank}")
    return found


def tokens(folder: Path, world_size: int) -> dict[int, Tensor]:
    """Of all ranks and all steps up to each boundary, by expert."""
    ranks = [torch.load(folder / f"tokens.{rank}") for rank in range(world_size)]
    total, found = torch.zeros_like(ranks[0][0]), {}
    for step in sorted(ranks[0]):
        total = total + sum(each[step] for each in ranks)
        found[step] = total
    return found


def in_memory(folder: Path, rank: int) -> Iterator[Taken]:
    """Generations that memory held at the end, newest first, whole or some experts of them."""
    for data, buffer, whole in torch.load(folder / f"memory.{rank}"):
        yield _taken("memory", RankMarker.from_bytes(data, "memory"), buffer, whole=whole)


def in_storage(folder: Path) -> list[tuple[Commit, list[Taken]]]:
    """Generations in storage, oldest first, of all ranks."""
    backend = open_backend((folder / "checkpoints").as_uri())
    store = RunStore.open(backend, resume="must")
    found = []
    for commit in reversed(store.candidates()):
        parts = []
        for rank in range(commit.world_size):
            marker = store.read_marker(commit, rank)
            buffer = torch.empty(marker.segments[0].nbytes, dtype=torch.uint8)
            read_segment(store, marker.segments[0], as_memoryview(buffer))
            parts.append(_taken("storage", marker, buffer))
        found.append((commit, parts))
    backend.close()
    return found


def _taken(tier: str, marker: RankMarker, buffer: Tensor, *, whole: bool = True) -> Taken:
    records = [
        (record, bytes_of(record, file_of(marker, segment, buffer)))
        for segment in marker.segments
        for record in segment.records
    ]
    journals = [decode_journal(value) for record, value in records if record.kind == "journal"]
    assert len(journals) == whole
    return Taken(
        tier=tier,
        rank=marker.rank,
        step=marker.generation.step,
        plan=PlanRecord.from_json(str(marker.policy["plan"])).plan,
        records=[(record, value) for record, value in records if record.kind == "full"],
        journal=journals[0] if whole else {},
        marker=marker,
        file=buffer,
        whole=whole,
    )


def file_of(marker: RankMarker, entry: SegmentEntry, buffer: Tensor) -> Tensor:
    """One file of a boundary."""
    start = marker.slot_offset(entry)
    return buffer[start : start + entry.nbytes]


def bytes_of(record: RecordEntry, buffer: Tensor) -> Tensor:
    """The bytes of a record."""
    return buffer[record.offset : record.offset + record.nbytes].clone()


def require_recorded(taken: Taken, state: Mapping[Key, tuple[int, Tensor]]) -> None:
    """Every record is, bit for bit, what the state was."""
    assert taken.records
    for record, found_U8 in taken.records:
        if record.state_key == "present":
            has_state = any(key[:2] == (record.operator, record.fqn) and key[2] != "param" for key in state)
            assert bool(found_U8.item()) == has_state
            continue
        if not record.present:
            continue
        start, flat = state[record.operator, record.fqn, record.state_key]
        wanted = flat[record.global_start - start :][: record.numel] if flat.numel() > 1 or record.numel > 1 else flat
        assert wanted.numel() == record.numel
        assert torch.equal(found_U8, wanted.contiguous().view(torch.uint8)), (taken.step, record.name)
