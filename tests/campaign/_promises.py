"""What a partial restart has to give, worked out from what was left on nodes and in storage, and what it gave."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from door import as_memoryview
from torch import Tensor

from campaign._campaign import checkpoints
from campaign._partial_damage import Spoilt, stored_markers
from campaign._states import Key
from lightning_moe_ckpt.journal import decode_journal
from lightning_moe_ckpt.policies import TokenLedger
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RunStore, open_backend, segment_key
from lightning_moe_ckpt.testing import AttemptResult

State = dict[Key, tuple[int, Tensor]]


@dataclass(frozen=True)
class Promise:
    """What a restart has to give."""

    generation: GenerationId
    experts: Mapping[str, GenerationId]


@dataclass(frozen=True)
class Tally:
    """Tokens counted one by one, int64 `[E]` over the experts of all layers."""

    processed: Tensor
    lost: Tensor
    routed: Tensor
    """With those that were dropped over capacity."""
    num_experts: tuple[int, ...]
    """By layer."""
    progress: float
    """Part of the training that they are of."""

    @property
    def plt(self) -> float:
        """PEC, eq. 4: of all tokens that are routed in the training."""
        return self.share(int(self.lost.sum()))

    def share(self, tokens: int) -> float:
        """What a fault that loses so many adds to it."""
        return tokens * self.progress / int(self.routed.sum())

    @property
    def mlt(self) -> float:
        """MOETION, eq. 6: layers count alike, however many tokens they have."""
        sizes = list(self.num_experts)
        rows = zip(torch.split(self.lost, sizes), torch.split(self.routed, sizes), strict=True)
        return sum(int(lost.sum()) / int(routed.sum()) for lost, routed in rows)


class Restarts:
    """What the lives of one run left, and what each began with. Every generation stays in storage.

    Args:
        lives: of the run.
    """

    def __init__(self, lives: Sequence[AttemptResult]) -> None:
        self.lives, self.workdir = lives, lives[0].workdir
        self.ranks = range(lives[0].world_size)
        self._promises: dict[tuple[int, bool, bool], Promise] = {}
        self._states: dict[tuple[int, GenerationId], State] = {}

    def load(self, life: int, rank: int, what: str) -> Any:
        return torch.load(self._file(life, rank, what))

    def read(self, life: int, rank: int, what: str) -> Any:
        return json.loads(self._file(life, rank, what).read_text())

    def _file(self, life: int, rank: int, what: str) -> Path:
        return self.workdir / f"partial.{life}.{rank}.{what}"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of every expert, in the order of layers."""
        sizes = {k: v for rank in self.ranks for k, v in self.read(0, rank, "experts")["sizes"].items()}
        names = [f"{prefix}/expert.{i}" for prefix, number in self._layers for i in range(number)]
        assert len(names) == len(sizes)
        return {name: sizes[name] for name in names}

    @property
    def _layers(self) -> list[tuple[str, int]]:
        rows = (
            layer for rank in self.ranks for layer in self.read(0, rank, "experts")["layers"]
        )  # stages have their own
        return list(dict.fromkeys((prefix, number) for prefix, number in rows))

    @cached_property
    def _committed(self) -> list[RankMarker]:
        return list(stored_markers(self.workdir))

    @cached_property
    def _spoilt(self) -> Spoilt | None:
        return Spoilt.read(self.workdir)

    @property
    def spoilt(self) -> Spoilt:
        """The damage that the run has met."""
        assert self._spoilt is not None
        return self._spoilt

    def began_at(self, life: int) -> int:
        """The boundary that a life resumed from."""
        return self.lives[life].steps()[0] - 1

    def alive(self, generation: GenerationId, life: int) -> bool:
        """Whether a life may use it: none in between went back behind it. Life `n` is incarnation `n + 1`."""
        between = range(generation.incarnation, life)
        return generation.incarnation <= life and all(generation.step <= self.began_at(each) for each in between)

    def promised(self, life: int, *, memory: bool = True, spoilt: bool = True) -> Promise:
        """From the markers that its ranks found on their nodes, and those in storage.

        Args:
            incarnation: that begins.
            memory: whether there is any; else from storage alone.
            spoilt: whether what was damaged is of no use.
        """
        key = (life, memory, spoilt)
        if key not in self._promises:
            self._promises[key] = self._promised(*key)
        return self._promises[key]

    def _promised(self, life: int, memory: bool, spoilt: bool) -> Promise:
        held = [each for rank in self.ranks for each in self.load(life, rank, "held")] if memory else []
        found = [(kind, RankMarker.from_bytes(data, "held")) for kind, data in held]
        found += [("storage", each) for each in self._committed]
        damage = self._spoilt if spoilt and life == 1 else None
        owners = defaultdict[GenerationId, set[int]](set)
        pieces = defaultdict[tuple[str, GenerationId], set[tuple[int, str, int]]](set)
        for place, marker in found:
            if not self.alive(marker.generation, life) or len(marker.steps) != 1:
                continue
            owners[marker.generation].add(marker.rank)
            for record in (each for segment in marker.segments for each in segment.records):
                is_good = damage is None or not damage.hits(place, marker, record.operator)
                if is_good and record.operator in self.sizes and record.state_key == "param":
                    piece = (marker.rank, record.name, record.numel)
                    pieces[record.operator, marker.generation].add(piece)
        newest = max(each for each, there in owners.items() if there == set(self.ranks))
        whole = defaultdict[str, list[GenerationId]](list)
        for (name, generation), there in pieces.items():
            if generation <= newest and sum(numel for *_, numel in there) == self.sizes[name]:
                whole[name].append(generation)
        return Promise(newest, {name: max(whole[name]) for name in self.sizes})

    def require(self, life: int) -> Promise:
        """An incarnation began with every operator, on every rank, exactly as promised."""
        promise = self.promised(life)
        assert promise.generation.step == self.began_at(life), (promise, self.lives[life].log())
        for rank in self.ranks:
            self._require(life, rank, promise)
        return promise

    def _require(self, life: int, rank: int, promise: Promise) -> None:
        found: State = self.load(life, rank, "restored")
        base = self.state(rank, promise.generation)
        sharing = defaultdict[str, set[str]](set)
        for operator, fqn, _ in base:
            sharing[fqn].add(operator)
        expected: State = {}
        for key, now in base.items():
            operator, fqn, _ = key
            if operator not in promise.experts or (len(sharing[fqn]) > 1 and now[1].numel() == 1):
                expected[key] = now  # of the dense part, or one value for several experts
                continue
            then = self.state(rank, promise.experts[operator])
            if key in then:
                expected[key] = then[key]
            elif len(sharing[fqn]) > 1:
                # It had none, but those that it shares a tensor with do.
                expected[key] = (now[0], torch.zeros_like(now[1]))
        assert found.keys() == expected.keys()
        for key, (start, value) in expected.items():
            assert found[key][0] == start
            assert torch.equal(found[key][1], value), (life, rank, key, promise, self.lives[life].log(rank))

    def state(self, rank: int, generation: GenerationId) -> State:
        """As recorded."""
        key = (rank, generation)
        if key not in self._states:
            self._states[key] = self.load(generation.incarnation - 1, rank, f"state.{generation.step}")
        return self._states[key]

    def require_turns(self, life: int, within: int) -> None:
        """No expert is older than so many generations, of which there is one after each step.

        What is promised follows from what was taken; this says that what was taken is what the policy owes.
        """
        promise = self.promised(life)
        old = {
            name: expert for name, expert in promise.experts.items() if promise.generation.step - expert.step > within
        }
        assert not old, f"life {life} resumed {promise.generation}; older than {within} steps: {old}"

    # -- tokens

    def counted(self, life: int, step: int, rank: int | None = None, what: str = "tokens") -> Tensor:
        """Tokens that were processed in one step, or `routed` ones, by expert; of all ranks, or of one."""
        ranks = self.ranks if rank is None else [rank]
        total = torch.zeros(len(self.sizes), dtype=torch.int64)
        for each in ranks:
            for place in self.read(life, each, f"{what}.{step}"):
                total[place] += 1
        return total

    def tally(self, *, memory: bool = True, restarts: int | None = None, until: int | None = None) -> Tally:
        """Tokens processed and lost by expert, counted one by one along the timeline.

        Args:
            memory: as it was; else what the last restart would have lost with storage alone.
            restarts: how many of them, all by default; then nothing is trained after the last one.
            until: of the last incarnation, steps after this one do not count.
        """
        names = list(self.sizes)
        steps: list[tuple[int, Tensor]] = []  # boundary that a step led to, and its tokens
        routed: dict[int, Tensor] = {}
        lost = torch.zeros(len(names), dtype=torch.int64)
        alive = torch.ones(0, len(names), dtype=torch.bool)
        last = len(self.lives) - 1 if restarts is None else restarts
        for life in range(last + 1):
            if life:
                promise = self.promised(life, memory=memory or life != last)
                kept = [i for i, (step, _) in enumerate(steps) if step <= promise.generation.step]
                steps, alive = [steps[i] for i in kept], alive[kept]
                for place, name in enumerate(names):
                    for i, (step, tokens) in enumerate(steps):
                        if step > promise.experts[name].step and alive[i, place]:
                            alive[i, place] = False
                            lost[place] += tokens[place]
            if life < last or restarts is None:
                all_steps = self.lives[life].steps()
                done = [s for s in all_steps if life < last or until is None or s <= until]
                steps += [(s, self.counted(life, s)) for s in done]
                routed |= {s: self.counted(life, s, what="routed") for s in done}
                alive = torch.cat([alive, torch.ones(len(done), len(names), dtype=torch.bool)])
        processed = torch.stack([tokens for _, tokens in steps]).sum(0)
        return Tally(
            processed,
            lost,
            sum((routed[step] for step, _ in steps), start=torch.zeros_like(processed)),
            tuple(number for _, number in self._layers),
            steps[-1][0] / self.planned,
        )

    @property
    def planned(self) -> int:
        """Steps of the whole training."""
        return self.lives[-1].steps()[-1]

    def lost_by(self, life: int) -> dict[str, int]:
        """Tokens that the restart at the beginning of an incarnation has lost, by expert."""
        at, before = self.tally(restarts=life), self.tally(restarts=life - 1) if life > 1 else None
        lost = at.lost if before is None else at.lost - before.lost
        return dict(zip(self.sizes, lost.tolist(), strict=True))

    @cached_property
    def accountings(self) -> dict[GenerationId, TokenLedger]:
        """What every generation in storage says, oldest first."""
        backend = open_backend(checkpoints(self.workdir).as_uri())
        store = RunStore.open(backend, resume="must")
        found = {}
        for commit in reversed(store.candidates()):
            if not (checkpoints(self.workdir) / segment_key(commit.generation, 0, commit.generation.step)).exists():
                continue  # somebody deleted it
            (segment,) = store.read_marker(commit, 0).segments
            (record,) = (record for record in segment.records if record.kind == "journal")
            buffer = torch.empty(record.nbytes, dtype=torch.uint8)
            store.read_range(segment, record.offset, as_memoryview(buffer))
            journal: Mapping[str, Any] = decode_journal(buffer)["outcome"]["accounting"]
            found[commit.generation] = TokenLedger.from_journal(journal)
        backend.close()
        return found

    def stored_accounting(self) -> TokenLedger:
        """What the last generation in storage says."""
        return list(self.accountings.values())[-1]

    def require_accounting(self) -> Tally:
        """What the run says of its tokens at its end is what counting one by one gives."""
        tally, said = self.tally(), self.stored_accounting()
        assert said.num_experts == tally.num_experts
        assert torch.equal(said.processed, tally.processed), (said.processed, tally.processed)
        assert torch.equal(said.lost, tally.lost), (said.lost, tally.lost)
        dropped = torch.split(tally.routed - tally.processed, list(tally.num_experts))
        assert said.dropped.tolist() == [int(each.sum()) for each in dropped]
        assert said.plt == tally.plt
        assert said.mlt == tally.mlt
        return tally
