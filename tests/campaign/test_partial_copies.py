"""Two copies of every expert in storage: a run that has lost one of a file's, or the file, goes on from the other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from door import parse_snap_key
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from campaign._campaign import Campaigns, checkpoints
from campaign._partial_runs import Machines, restarts, train_partial, two_level_setup
from campaign._promises import Promise, Restarts
from campaign._training import Module, Setup
from campaign.test_selective import selective_setup
from lightning_moe_ckpt.callbacks import PartialExpertCheckpoint
from lightning_moe_ckpt.errors import NoUsableGeneration
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    RankMarker,
    RecordEntry,
    RunStore,
    SegmentEntry,
    full_records,
    open_backend,
)
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

KILL = Kill(phase="forward", step=15)
"""When every expert of six has come twice, and what the second copies lie in has referred to what is gone."""

Ruin = Callable[[Path], None]


def short_of_space(setup: Setup) -> Setup:
    """The two newest generations stay, and what they need."""
    assert setup.checkpointing is not None
    return replace(setup, batches=18, checkpointing=replace(setup.checkpointing, keep=2))


def stored(workdir: Path, *, promote: bool = True) -> dict[GenerationId, tuple[Commit, list[RankMarker]]]:
    """Manifests and markers of all that the log allows, whether a restart would begin from it or not; newest first."""
    with closing(open_backend(checkpoints(workdir).as_uri())) as backend:
        store = RunStore.open(backend, resume="must")
        if promote:
            store.promote()  # as the next incarnation will, where there is one
        commits = [*store.candidates(), *store.sources]
        return {c.generation: (c, [store.read_marker(c, rank) for rank in range(c.world_size)]) for c in commits}


def flip(path: Path, record: RecordEntry) -> None:
    """Turn a bit of a record."""
    path.chmod(0o600)
    descriptor = os.open(path, os.O_RDWR)
    at = record.offset + record.nbytes // 2
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 16]), at)
    os.close(descriptor)


def truncate(path: Path, record: RecordEntry) -> None:
    """The file ends within a record."""
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[: record.offset + 1])


def delete(path: Path, record: RecordEntry) -> None:
    path.unlink()


def lose_manifest(path: Path, record: RecordEntry) -> None:
    """A bit of a record, and one of the manifest of what it refers to."""
    flip(path, record)
    manifest = path.parent / "_COMMITTED"
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes()[:-9])


def promise_after(workdir: Path, hit: Collection[str]) -> Promise:
    """The newest generation, with the spares of the experts in `hit`."""
    newest, (_, markers) = next(iter(stored(workdir).items()))
    experts: dict[str, GenerationId] = {}
    for marker in markers:
        for file, record in full_records(marker):
            if "/expert." in record.operator:
                place = parse_snap_key(file.key)
                assert place is not None
                experts[record.operator] = place[0]
        for spare in marker.spares:
            experts |= {record.operator: spare.generation for record in spare.segment.records if record.operator in hit}
    return Promise(newest, experts)


def note(workdir: Path, promise: Promise, hit: Sequence[str]) -> None:
    rows = {name: astuple(expert) for name, expert in promise.experts.items()}
    (workdir / "promise").write_text(json.dumps([astuple(promise.generation), rows, list(hit)]))


def noted(workdir: Path) -> tuple[Promise, list[str]]:
    at, rows, hit = json.loads((workdir / "promise").read_text())
    return Promise(GenerationId(*at), {name: GenerationId(*row) for name, row in rows.items()}), hit


def ruin_one(damage: Callable[[Path, RecordEntry], None], workdir: Path) -> None:
    """Damage the file of the newest copy of an expert that the newest generation references, of whatever rank has it."""
    _, markers = next(iter(stored(workdir).values()))
    entry = max((each for marker in markers for each in marker.referenced), key=lambda each: each.generation)
    record = entry.segment.records[0]
    whole = [] if damage in {flip, lose_manifest} else [each.operator for each in entry.segment.records]
    hit = sorted({record.operator, *whole})
    note(workdir, promise_after(workdir, hit), hit)
    damage(checkpoints(workdir) / entry.segment.key, record)


def files_of(workdir: Path, expert: str) -> list[tuple[SegmentEntry, RecordEntry]]:
    """Every record of an expert in every file."""
    segments = [s for _, markers in stored(workdir).values() for marker in markers for s in marker.segments]
    return [(segment, record) for segment in segments for record in segment.records if record.operator == expert]


def ruin_all(workdir: Path) -> None:
    """Turn a bit in every copy of an expert that the newest generation references."""
    _, markers = next(iter(stored(workdir).values()))
    expert = next(marker.referenced[-1].segment.records[0].operator for marker in markers if marker.referenced)
    promise = promise_after(workdir, [])
    note(workdir, promise, [expert])
    for segment, record in files_of(workdir, expert):
        flip(checkpoints(workdir) / segment.key, record)


def train_ruined(setup: Setup, machines: Machines, ruin: Ruin, life: Attempt) -> Mapping[str, Any]:
    """Memory is lost between two incarnations, and `ruin` comes over storage."""
    if life.index == 1 and life.rank == 0:
        ruin(life.workdir)
    return train_partial(setup, machines, life)


def logs(found: Restarts) -> str:
    return "".join(found.lives[1].log(rank) for rank in found.ranks)


@pytest.mark.parametrize(
    ("world_size", "expert_parallel", "policy", "damage"),
    [
        (1, 1, "partial", flip),
        (1, 1, "partial", delete),
        pytest.param(3, 1, "partial", delete, marks=pytest.mark.soak),
        pytest.param(3, 3, "partial", flip, marks=pytest.mark.soak),
        pytest.param(1, 1, "partial", truncate, marks=pytest.mark.soak),
        pytest.param(1, 1, "partial", lose_manifest),
        pytest.param(1, 1, "selective", flip, marks=pytest.mark.soak),
        pytest.param(3, 1, "selective", truncate, marks=pytest.mark.soak),
    ],
)
def test_a_bad_file_costs_its_experts_one_turn(
    campaigns: Campaigns,
    folder: Path,
    *,
    world_size: int,
    expert_parallel: int,
    policy: str,
    damage: Callable[[Path, RecordEntry], None],
) -> None:
    """All that is kept refers to it. Its experts come from the copy before, in what is there only for that; bit for bit."""
    machines = Machines(folder, (0,) * world_size, lost=((0,),))
    make = two_level_setup if policy == "partial" else selective_setup
    setup = short_of_space(make(world_size, expert_parallel))
    found = restarts(
        campaigns, setup, machines, KILL, fit=partial(train_ruined, setup, machines, partial(ruin_one, damage))
    )
    promise, hit = noted(found.workdir)
    found._promises[1, True, True] = promise
    found.require(1)
    found.require_accounting()
    lost = found.lost_by(1)
    for name in hit:
        said = re.search(
            rf"{re.escape(name)}: its copy of .* is bad, (step \d+ .*?) is taken; tokens lost: (\d+)", logs(found)
        )
        assert said is not None, logs(found)
        assert said[1] == str(promise.experts[name])
        assert int(said[2]) == lost[name]
    assert re.search(r"is partial: \d+ experts \(.*; from storage: \d+\); \d+ tokens lost, PLT", logs(found))
    after = {at: markers for at, (_, markers) in stored(found.workdir).items() if at.incarnation > 1}
    assert after
    for markers in after.values():
        kept = [e.generation for m in markers for e in m.referenced for r in e.segment.records if r.operator in hit]
        assert all(each in {promise.experts[name] for name in hit} or each.incarnation > 1 for each in kept)


@pytest.mark.parametrize(("world_size", "model"), [(1, "lists"), pytest.param(3, "stacked", marks=pytest.mark.soak)])
def test_without_any_copy_of_an_expert_the_others_come_back_if_that_is_allowed(
    campaigns: Campaigns, folder: Path, world_size: int, model: str
) -> None:
    """It begins anew; else the error names it, its files, and what would help."""
    machines = Machines(folder, (0,) * world_size, lost=((0,),))
    base = short_of_space(replace(two_level_setup(world_size, 1), model=model))  # type: ignore[arg-type]
    assert base.checkpointing is not None
    setup = replace(base, checkpointing=replace(base.checkpointing, arguments=(("allow_missing_experts", True),)))
    found = restarts(campaigns, setup, machines, KILL, fit=partial(train_refused_first, base, setup, machines))
    promise, (expert,) = noted(found.workdir)
    assert promise.generation.step == found.began_at(1)
    given = {**promise.experts, expert: promise.generation}
    for rank in found.ranks:
        restored, fresh = found.load(1, rank, "restored"), found.load(1, rank, "fresh")
        for key, (start, value) in found.state(rank, promise.generation).items():
            shared = model == "stacked" and value.numel() == 1
            if key[0] != expert or shared:
                aged = key[0] in given and not shared
                then = found.state(rank, given[key[0]]) if aged else {key: (start, value)}
                assert torch.equal(restored[key][1], then[key][1]), key
            elif key[2] == "param":
                begins = fresh[key[1]].flatten()[start : start + value.numel()]
                assert torch.equal(restored[key][1], begins), key
            else:
                assert model == "stacked" or key not in restored, "it has no optimizer state"
                assert key not in restored or not restored[key][1].any(), key
    said = re.search(
        rf"{re.escape(expert)} is lost: it begins anew.*tokens lost: (\d+); its copies: .*snap/", logs(found)
    )
    assert said is not None, logs(found)
    assert int(said[1]) > 0
    if world_size == 1:
        refused = (found.workdir / "refused").read_text()
        assert re.search(rf"no whole copy is left of 1 experts: {re.escape(expert)} \(.*snap/.*\.safetensors", refused)
        assert "allow_missing_experts=True" in refused


def train_refused_first(strict: Setup, setup: Setup, machines: Machines, life: Attempt) -> Mapping[str, Any]:
    """The second incarnation loses all copies of an expert; on one rank it is tried without first."""
    if life.index == 1 and life.rank == 0:
        ruin_all(life.workdir)
    if life.index == 1 and strict.world_size == 1:
        with pytest.raises(NoUsableGeneration) as refused:
            train_partial(strict, machines, life)
        (life.workdir / "refused").write_text(str(refused.value))
    configure = Module.configure_optimizers

    def with_weights_kept(module: Module) -> Any:
        begins = {name: param.detach() for name, param in module.named_parameters()}
        torch.save(begins, life.workdir / f"partial.{life.index}.{life.rank}.fresh")
        return configure(module)

    Seam(module="campaign._training", attribute="Module.configure_optimizers", replacement=with_weights_kept).apply()
    return train_partial(setup, machines, life)


class SpoilsAndScrubs(Callback):
    """Before step 9 a bit turns in what rank 0 references, and each rank reads again what it references."""

    def __init__(self, life: Attempt) -> None:
        self._life = life

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step != 8:
            return
        own = trainer.checkpoint_callback
        assert isinstance(own, PartialExpertCheckpoint)
        assert own._run is not None
        tokens = own._run.session._planner.tokens
        assert tokens is not None
        assert tokens._bad.scrubber is not None
        assert own.wait_committed(), "the newest marker of each rank is that of what is stored last"
        if self._life.rank == 0:
            _, markers = next(iter(stored(self._life.workdir, promote=False).values()))
            entry = markers[0].referenced[-1]  # whose turn is far away
            record = entry.segment.records[0]
            flip(checkpoints(self._life.workdir) / entry.segment.key, record)
            (self._life.workdir / "scrubbed").write_text(json.dumps([record.operator, entry.generation.step]))
        tokens._bad.scrubber.round()


def train_scrubbed(setup: Setup, machines: Machines, life: Attempt) -> Mapping[str, Any]:
    return train_partial(setup, machines, life, SpoilsAndScrubs(life))


@pytest.mark.parametrize("world_size", [3])
def test_what_goes_bad_while_a_job_runs_is_stored_again(campaigns: Campaigns, folder: Path, world_size: int) -> None:
    """One rank finds it; no generation references it from then on, and the next one that is planned has it."""
    setup = two_level_setup(world_size, 1)
    (life,) = campaigns.run(setup, fit=partial(train_scrubbed, setup, Machines(folder, (0,) * world_size)))
    assert life.outcome == "finished", life.log()
    expert, bad = json.loads((life.workdir / "scrubbed").read_text())
    found = {at.step: markers for at, (_, markers) in stored(life.workdir).items()}
    for step in range(9, 13):
        referenced = {
            e.generation.step
            for m in found[step]
            for e in m.referenced
            for r in e.segment.records
            if r.operator == expert
        }
        assert bad not in referenced, step
        owned = any(record.operator == expert for marker in found[step] for _, record in full_records(marker))
        assert owned, f"step {step} names a good copy"
    own = {step: {r.operator for m in found[step] for r in m.segments[0].records} for step in (9, 10)}
    assert expert in own[10]
    said = re.search(
        rf"WARNING:.*{re.escape(expert)}: its copy of step {bad} .* is bad; it is taken again", life.log(0)
    )
    assert said is not None
    assert "is taken again" not in life.log(1), "each file has one reader"
