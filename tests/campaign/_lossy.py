"""What a lossy restart has to give, worked out from what was left on nodes and in storage, and what it gave."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from campaign._campaign import checkpoints
from campaign._models import ListMoE
from campaign._states import Key, state_of
from campaign._training import Setup, quiet
from lightning_moe_ckpt.callbacks import PartialExpertCheckpoint
from lightning_moe_ckpt.moe._dispatch import Dispatch, plan_dispatch
from lightning_moe_ckpt.operators import discover
from lightning_moe_ckpt.session import decode_journal
from lightning_moe_ckpt.session._layout import as_memoryview
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RunStore, open_backend
from lightning_moe_ckpt.testing import Seam
from lightning_moe_ckpt.testing._lives import Life, LifeResult
from lightning_moe_ckpt.tiers import HostTier
from lightning_moe_ckpt.tiers._names import memory_files
from lightning_moe_ckpt.tiers._shm import DIRECTORY_VARIABLE

State = dict[Key, tuple[int, Tensor]]


@dataclass(frozen=True)
class Machines:
    """Where ranks run, and which nodes are lost with each life."""

    folder: Path
    placed: tuple[int, ...]
    """Node of each rank."""
    lost: tuple[tuple[int, ...], ...] = ()
    """Nodes that are lost with the first life, the second and so on; others take their places."""
    replicas: int | Literal["auto"] = "auto"
    flip: str = ""
    """An expert; a bit of its newest record in storage is flipped before the second life."""

    def memory(self, life: Life) -> Path:
        """Shared memory of the machine that a rank runs on."""
        node = self.placed[life.rank]
        turn = sum(node in lost for lost in self.lost[: life.index])
        return self.folder / f"node{node}.{turn}"


class RecordsLossy(Callback):
    """Writes down the state at every boundary, and when training begins, and every token that an expert got.

    Args:
        own: the checkpoint callback.
        life: this one.
        ep_size: expert parallelism.
    """

    def __init__(self, own: PartialExpertCheckpoint, life: Life, ep_size: int) -> None:
        self._own, self._life, self._ep_size = own, life, ep_size
        self._began = False
        self.tokens: list[int] = []
        """Place of the expert of each token since the last step."""

    def file(self, what: str) -> Path:
        """Of this rank in this life."""
        return self._life.workdir / f"lossy.{self._life.index}.{self._life.rank}.{what}"

    def _keep(self, what: str, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(state_of(pl_module, trainer.optimizers[0], self._ep_size), self.file(what))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if not self._began:
            self._began = True
            self._keep("restored", trainer, pl_module)
            self._keep(f"state.{trainer.global_step}", trainer, pl_module)
            sizes = {op.name: op.numel for op in discover(pl_module, ep_size=self._ep_size) if op.kind == "expert"}
            self.file("experts").write_text(json.dumps(sizes))
        self.tokens.clear()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        assert self._own.wait_committed()
        self.file(f"tokens.{trainer.global_step}").write_text(json.dumps(self.tokens))
        self._keep(f"state.{trainer.global_step}", trainer, pl_module)


def train_lossy(setup: Setup, machines: Machines, life: Life, *others: Callback) -> Mapping[str, Any]:
    """Train on machines, with everything written down; `others` come before what writes it down."""
    quiet()
    torch.manual_seed(life.seed)
    memory = machines.memory(life)
    memory.mkdir(parents=True, exist_ok=True)
    os.environ[DIRECTORY_VARIABLE] = str(memory)
    assert setup.checkpointing is not None
    own = setup.checkpointing.make(life.url)
    assert isinstance(own, PartialExpertCheckpoint)
    own.replicas = machines.replicas
    recorder = RecordsLossy(own, life, setup.expert_parallel)
    _list_memory(memory, recorder.file("held"))
    if machines.flip and life.index == 1 and life.rank == 0:
        _flip_newest(life.workdir, machines.flip)
    _log_tokens(recorder.tokens)
    trainer = Trainer(callbacks=life.callbacks(*others, recorder, own), **setup.trainer_options(life))
    trainer.fit(setup.make_module(life), *setup.loaders(life))
    return {}


def _list_memory(memory: Path, out: Path) -> None:
    """Markers in the memory of a node."""
    found = []
    for run_id in {name.run_id for _, name in memory_files(memory)}:
        tier = HostTier(run_id, memory)
        found += [tier.read_marker(holding).to_bytes() for holding in tier.holdings()]
        tier.close()
    torch.save(found, out)


def _flip_newest(workdir: Path, expert: str) -> None:
    """In the newest generation of storage that has the expert, on the first rank that writes some of it."""
    rows = [
        (marker.generation, -marker.rank, segment.key, record.offset)
        for marker in _stored(workdir)
        for segment in marker.segments
        for record in segment.records
        if record.operator == expert and record.state_key == "param"
    ]
    generation, rank, key, offset = max(rows)
    (workdir / "flipped").write_text(json.dumps([generation.step, generation.epoch, -rank, expert]))
    with (checkpoints(workdir) / key).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _log_tokens(log: list[int]) -> None:
    """Every token that reaches an expert of one of the two kinds of layers, as its place."""
    plan, choose = plan_dispatch, ListMoE._choose

    def plan_logged(topk_idx_TK: Tensor, *args: Any) -> Dispatch:
        dispatch = plan(topk_idx_TK, *args)
        log.extend(topk_idx_TK.t().reshape(-1)[dispatch.slots].tolist())
        return dispatch

    def choose_logged(self: ListMoE, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        weight_T, expert_T = choose(self, probs_TE)
        log.extend(expert_T.tolist())
        return weight_T, expert_T

    Seam(module="lightning_moe_ckpt.moe._layer", attribute="plan_dispatch", replacement=plan_logged).apply()
    Seam(module="campaign._models", attribute="ListMoE._choose", replacement=choose_logged).apply()


def _stored(workdir: Path) -> Iterator[RankMarker]:
    """Markers of all committed generations."""
    backend = open_backend(checkpoints(workdir).as_uri())
    store = RunStore.open(backend, resume="must")
    for commit in store.candidates():
        for rank in range(commit.world_size):
            yield store.read_marker(commit, rank)
    backend.close()


@dataclass(frozen=True)
class Promise:
    """What a restart has to give."""

    generation: GenerationId
    experts: Mapping[str, GenerationId]


class Restarts:
    """What the lives of one run left, and what each began with. Every generation stays in storage.

    Args:
        lives: of the run.
    """

    def __init__(self, lives: Sequence[LifeResult]) -> None:
        self._lives, self.workdir = lives, lives[0].workdir
        self._ranks = range(lives[0].world_size)

    def load(self, life: int, rank: int, what: str) -> Any:
        return torch.load(self._file(life, rank, what))

    def _file(self, life: int, rank: int, what: str) -> Path:
        return self.workdir / f"lossy.{life}.{rank}.{what}"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of every expert."""
        return {k: v for rank in self._ranks for k, v in json.loads(self._file(0, rank, "experts").read_text()).items()}

    @cached_property
    def _committed(self) -> list[RankMarker]:
        return list(_stored(self.workdir))

    def began_at(self, life: int) -> int:
        """The boundary that a life resumed from."""
        return self._lives[life].steps()[0] - 1

    def alive(self, generation: GenerationId, life: int) -> bool:
        """Whether a life may use it: no life in between went back behind it. Life `n` has epoch `n + 1`."""
        between = range(generation.epoch, life)
        return generation.epoch <= life and all(generation.step <= self.began_at(each) for each in between)

    def promised(self, life: int, *, memory: bool = True) -> Promise:
        """From the markers that its ranks found on their nodes, and those in storage; without what was spoilt."""
        held = [each for rank in self._ranks for each in self.load(life, rank, "held")] if memory else []
        markers = [RankMarker.from_bytes(each, "held") for each in held] + self._committed
        markers = [each for each in markers if self.alive(each.generation, life) and len(each.segments) == 1]
        owners = defaultdict[GenerationId, set[int]](set)
        pieces = defaultdict[tuple[str, GenerationId], set[tuple[int, str, int]]](set)
        for marker in markers:
            owners[marker.generation].add(marker.rank)
            for record in marker.segments[0].records:
                is_expert = record.operator in self.sizes and record.state_key == "param"
                if is_expert and not self._spoilt(marker, record.operator):
                    piece = (marker.rank, record.name, record.numel)
                    pieces[record.operator, marker.generation].add(piece)
        newest = max(each for each, found in owners.items() if found == set(self._ranks))
        experts = {
            expert: max(
                generation
                for (name, generation), found in pieces.items()
                if name == expert and generation <= newest and sum(numel for *_, numel in found) == size
            )
            for expert, size in self.sizes.items()
        }
        return Promise(newest, experts)

    def _spoilt(self, marker: RankMarker, expert: str) -> bool:
        path = self.workdir / "flipped"
        here = [marker.generation.step, marker.generation.epoch, marker.rank, expert]
        return path.exists() and json.loads(path.read_text()) == here

    def require(self, life: int) -> Promise:
        """A life began with every operator, on every rank, exactly as promised."""
        promise = self.promised(life)
        assert promise.generation.step == self.began_at(life), (promise, self._lives[life].log())
        for rank in self._ranks:
            self._require(life, rank, promise)
        return promise

    def _require(self, life: int, rank: int, promise: Promise) -> None:
        found: State = self.load(life, rank, "restored")
        base = self._state(rank, promise.generation)
        sharing = defaultdict[str, set[str]](set)
        for operator, fqn, _ in base:
            sharing[fqn].add(operator)
        expected: State = {}
        for key, now in base.items():
            operator, fqn, _ = key
            if operator not in promise.experts or (len(sharing[fqn]) > 1 and now[1].numel() == 1):
                expected[key] = now  # of the dense part, or one value for several experts
                continue
            then = self._state(rank, promise.experts[operator])
            if key in then:
                expected[key] = then[key]
            elif len(sharing[fqn]) > 1:
                expected[key] = (
                    now[0],
                    torch.zeros_like(now[1]),
                )  # it had none, but those that it shares a tensor with do
        assert found.keys() == expected.keys()
        for key, (start, value) in expected.items():
            assert found[key][0] == start
            assert torch.equal(found[key][1], value), (life, rank, key, promise, self._lives[life].log(rank))

    def _state(self, rank: int, generation: GenerationId) -> State:
        state: State = self.load(generation.epoch - 1, rank, f"state.{generation.step}")
        return state

    # -- tokens

    def counted(self, life: int, step: int) -> Tensor:
        """Tokens of all ranks in one step, by expert."""
        total = torch.zeros(len(self.sizes), dtype=torch.int64)
        for rank in self._ranks:
            for place in json.loads(self._file(life, rank, f"tokens.{step}").read_text()):
                total[place] += 1
        return total

    def accounted(self, *, memory: bool = True, until: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens processed and lost by expert, counted one by one along the timeline.

        Args:
            memory: as it was; else what the last restart would have lost with storage alone.
            until: the number of restarts; all of them by default.
        """
        names = sorted(self.sizes, key=lambda name: int(name.rpartition(".")[2]))
        steps: list[tuple[GenerationId, Tensor]] = []  # boundary that a step led to, tokens in it that count
        lost = torch.zeros(len(names), dtype=torch.int64)
        alive = torch.ones(0, len(names), dtype=torch.bool)
        last = len(self._lives) - 1 if until is None else until
        for life in range(last + 1):
            if life:
                promise = self.promised(life, memory=memory or life != last)
                kept = [i for i, (g, _) in enumerate(steps) if g.step <= promise.generation.step]
                steps, alive = [steps[i] for i in kept], alive[kept]
                for place, name in enumerate(names):
                    for i, (generation, tokens) in enumerate(steps):
                        if generation.step > promise.experts[name].step and alive[i, place]:
                            alive[i, place] = False
                            lost[place] += tokens[place]
            if life < last or until is None:
                done = [
                    (GenerationId(step=s, epoch=life + 1), self.counted(life, s)) for s in self._lives[life].steps()
                ]
                steps += done
                alive = torch.cat([alive, torch.ones(len(done), len(names), dtype=torch.bool)])
        processed = torch.stack([tokens for _, tokens in steps]).sum(0)
        return processed, lost

    def stored_accounting(self) -> Mapping[str, Any]:
        """What the last generation in storage says."""
        backend = open_backend(checkpoints(self.workdir).as_uri())
        store = RunStore.open(backend, resume="must")
        commit = store.candidates()[0]
        (segment,) = store.read_marker(commit, 0).segments
        (record,) = (record for record in segment.records if record.kind == "journal")
        buffer = torch.empty(record.nbytes, dtype=torch.uint8)
        store.read_range(segment, record.offset, as_memoryview(buffer))
        backend.close()
        journal: Mapping[str, Any] = decode_journal(buffer)["outcome"]["accounting"]
        return journal
