"""What `moe-ckpt replay` stores of a step is what the run itself would have stored in this step, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from campaign._campaign import checkpoints, memory_of_run
from campaign._draw import draw
from campaign._pipelined import Pipelined
from campaign._replayed import Again, train_dumped
from campaign._training import Checkpointing, Setup
from campaign._warm import WarmParents
from campaign.test_frozen_base import frozen_base
from lightning_moe_ckpt.testing import Kill, assert_same_end, run_attempts

KEPT: dict[str, Any] = {"keep": 99, "arguments": (("replicas", 0),)}
DENSE = Checkpointing(policy="dense", every_n_steps=3, **KEPT)
SPARSE = Checkpointing(policy="sparse", window=3, **KEPT)
DIFFERENTIAL = Checkpointing(policy="differential", batch=4, **KEPT)
POLICIES = {"dense": DENSE, "sparse": SPARSE, "differential": DIFFERENTIAL}


def listed(folder: Path) -> dict[str, tuple[int, int]]:
    """All files of a run, by size and time of the last change."""
    found = {str(each): each.stat() for each in checkpoints(folder).rglob("*") if each.is_file()}
    return {name: (each.st_size, each.st_mtime_ns) for name, each in found.items()}


def replayed(warm: WarmParents, folder: Path, setup: Setup, *steps: tuple[int, int]) -> list[dict[str, Any]]:
    """Train once, run these steps again, else the middle one, compare all dumps, and return what each replay says."""
    place: dict[str, Any] = {"url": checkpoints(folder).as_uri(), "world_size": setup.world_size}
    dumps, said = folder / "dumps", []
    warm.call(run_attempts, partial(train_dumped, setup, dumps), workdir=folder / "run", **place)
    last = max(int(path.name.partition("-")[2].partition(".")[0]) for path in dumps.iterdir())
    steps = steps or ((last // 2, last // 2),)
    before, memory = listed(folder), memory_of_run(checkpoints(folder))
    for step, until in steps:
        again = folder / f"again{step}"
        again.mkdir()
        warm.call(run_attempts, Again(setup, again, step, until), workdir=folder / f"at{step}", first_index=1, **place)
        said.append(json.loads((again / "results.json").read_text()))
        found = sorted(again.glob("*.safetensors"))
        assert len(found) == 3 * setup.world_size * (until + 1 - step)
        assert [path.name for path in found if path.read_bytes() != (dumps / path.name).read_bytes()] == []
        assert (listed(folder), memory_of_run(checkpoints(folder))) == (before, memory)
    first, second = (sorted(dumps.glob(f"step-{step}.*")) for step in (steps[0][0], steps[0][0] + 1))
    kinds = zip(first, second, strict=True)  # a batch may come twice, and gradients that are no numbers
    assert [
        one.name for one, other in kinds if "activations" in one.name and one.read_bytes() == other.read_bytes()
    ] == []
    assert [each.name for each in first if not load_file(each)] == []
    return said


def compared(said: dict[str, Any]) -> int:
    """Losses that are those of the run's journals; none differs."""
    rows = [row for rank, *_ in said["ranks"] for row in rank]
    assert [row for row in rows if row[3] is False] == []
    return sum(row[3] is True for row in rows)


@pytest.mark.parametrize(
    "policy", ["sparse", *(pytest.param(each, marks=pytest.mark.soak) for each in ("dense", "differential"))]
)
def test_a_step_again(warm: WarmParents, tmp_path: Path, policy: str) -> None:
    """One rank, from storage alone, by a process with another seed, with validation and a new epoch between."""
    setup = Setup(checkpointing=POLICIES[policy], epochs=2)
    (said,) = replayed(warm, tmp_path, setup, (7, 8))
    assert compared(said) > 0


LAYOUTS: dict[str, Setup] = {
    "three ranks": Setup(world_size=3, model="tied", accumulate=2, epochs=4),
    "four ranks, DDP": Setup(world_size=4, strategy="ddp", model="stacked", scheduler="plateau"),
    "two groups of experts": Setup(world_size=4, expert_parallel=2, model="layers", optimizer="adamw_amsgrad"),
    "two stages": Pipelined(world_size=4, stages=2, epochs=2),
    "bf16, averages": Setup(precision="bf16-mixed", averaged="ema", model="batch_norm", workers=2),
    "fp16, overflows": Setup(precision="16-mixed", overflow_steps=(5,), epoch_metrics=True),
}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_again_on_many_ranks(warm: WarmParents, tmp_path: Path, layout: str, policy: str) -> None:
    """At the generation's own step and behind it, in the same epoch and behind its end."""
    if isinstance(setup := LAYOUTS[layout], Pipelined) and policy == "differential":
        pytest.skip("`DifferentialCheckpoint` refuses stages")
    said = replayed(warm, tmp_path, replace(setup, checkpointing=POLICIES[policy]), (3, 3), (4, 6), (8, 8))
    assert sum(map(compared, said)) > 0


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_does_not_notice(warm: WarmParents, tmp_path: Path, policy: str) -> None:
    """Steps are run again while it trains; it is killed, goes on from memory, and ends as if alone."""
    setup = Setup(checkpointing=POLICIES[policy], epochs=12)
    place: dict[str, Any] = {"url": checkpoints(tmp_path).as_uri(), "world_size": 1}
    fit, kill = partial(train_dumped, setup, tmp_path / "dumps"), Kill(phase="after_batch_end", step=50)
    for name in ("live", "killed"):
        (tmp_path / name).mkdir()
    again, at = Again(setup, tmp_path / "live", 20, 22, seconds=60.0), {**place, "first_index": 1}
    run = {**place, "workdir": tmp_path / "run"}
    calls = [((fit,), {**run, "kills": [kill]}), ((again,), {**at, "workdir": tmp_path / "at"})]
    lives, replays = warm.map(run_attempts, calls)
    assert [life.outcome for life in (*lives, *replays)] == ["killed", "finished", "finished"]
    first = lives[0].steps()
    assert first == [*range(1, 51)]
    reference = warm.call(run_attempts, setup.fault_free().fit, url="", workdir=tmp_path / "reference")
    assert_same_end(reference, lives)
    assert compared(json.loads((tmp_path / "live" / "results.json").read_text())) > 0
    found = [*(tmp_path / "live").glob("*.safetensors")]
    assert len(found) == 9
    assert all(path.read_bytes() == (tmp_path / "dumps" / path.name).read_bytes() for path in found)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_other_losses_have_a_reason(warm: WarmParents, tmp_path: Path) -> None:
    """Experts of different ages are a state that the run never had; other ranks sum in another order."""
    partial_run = Setup(checkpointing=Checkpointing(policy="partial", **KEPT))
    two_ranks = Setup(checkpointing=DENSE, world_size=2)
    for setup, ranks, said in ((partial_run, 1, "are not exact, and this is one"), (two_ranks, 1, "")):
        folder = tmp_path / str(setup.world_size)
        place: dict[str, Any] = {"url": checkpoints(folder).as_uri()}
        fit, results = partial(train_dumped, setup, folder / "dumps"), folder / "again"
        warm.call(run_attempts, fit, workdir=folder / "run", world_size=setup.world_size, **place)
        results.mkdir()
        again = Again(replace(setup, world_size=ranks), results, 7, 8)
        warm.call(run_attempts, again, workdir=folder / "at", world_size=ranks, first_index=1, **place)
        found = json.loads((results / "results.json").read_text())
        assert said in "".join(note for _, _, notes in found["ranks"] for note in notes), found
        if setup is two_ranks:
            assert {row[3] for rank, *_ in found["ranks"] for row in rank} == {None}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(40))
def test_drawn_trainings(warm: WarmParents, tmp_path: Path, seed: int) -> None:
    """With what users' hooks and data do, and frozen bases."""
    case = frozen_base(seed) if seed % 2 else draw(seed)
    checkpointing = replace(POLICIES[sorted(POLICIES)[seed % 3]], batches="reposition")
    setup = replace(case.setup, checkpointing=checkpointing)
    replayed(warm, tmp_path, setup)
