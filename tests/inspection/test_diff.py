"""`moe-ckpt diff`: equal runs are equal, a fault of one step is named, and the step at which runs part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from door import CheckpointCallback
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from inspection._runs import Small, SmallMoE, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.inspection import _diff
from lightning_moe_ckpt.strategy import MoEStrategy

FAULTY = 4
"""Step in which a gradient has a flipped bit."""
POLICIES: dict[str, Callable[[str], CheckpointCallback]] = {
    "dense": partial(DenseCheckpoint, every_n_steps=2, keep=9),
    "sparse": partial(SparseCheckpoint, window=2, keep=9),
    "differential": partial(DifferentialCheckpoint, every_n_steps=5, batch=2, keep=20),
}


class FlippedBit(Callback):
    """Flips a bit in one element of a gradient, in one step."""

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step == FAULTY:
            grad = pl_module.get_parameter("net.0.weight").grad
            assert grad is not None
            grad.view(torch.int32).view(-1)[5] ^= 1 << 22


@pytest.fixture(scope="module", params=POLICIES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """URLs of three runs: two alike, and one with a fault."""
    root, make = tmp_path_factory.mktemp(request.param), POLICIES[request.param]
    for name in ("a", "alike", "faulty"):
        seed_everything(1, verbose=False)
        train(Small(), make(str(root / name)), *[FlippedBit()] * (name == "faulty"), steps=9)
    return str(root / "a"), str(root / "alike"), str(root / "faulty")


def told(capsys: pytest.CaptureFixture[str], *argv: str, status: int) -> dict[str, Any]:
    """The document that `diff` writes."""
    assert main(["diff", *argv, "--json"]) == status
    return dict(json.loads(capsys.readouterr().out))


def test_runs_alike_are_equal(capsys: pytest.CaptureFixture[str], runs: tuple[str, str, str]) -> None:
    """Nothing is read for it but journals, and nothing else differs."""
    found = told(capsys, runs[0], runs[1], status=0)
    assert found["equal"]
    assert (found["compared"], found["different"], found["beside"], found["parting"]) == (3, [], [], None)


def test_the_step_at_which_runs_part_is_found(capsys: pytest.CaptureFixture[str], runs: tuple[str, str, str]) -> None:
    """A bit of one gradient, in one step: the last generation before it is equal, the next is not."""
    found = told(capsys, runs[0], runs[2], status=1)
    parting = found["parting"]
    assert parting["equal"] is None or parting["equal"] <= FAULTY
    assert parting["differs"] > FAULTY
    assert parting["looked"] <= 4
    if parting["equal"] is not None:
        told(capsys, f"{runs[0]}@{parting['equal']}", f"{runs[2]}@{parting['equal']}", status=0)
    found = told(capsys, f"{runs[0]}@{parting['differs']}", runs[2], status=1)
    assert "net.0" in found["different"]
    left = parting["first"].endswith(f"as step {FAULTY} has left it")
    assert left or parting["first"].startswith(f"the loss of step {FAULTY + 1}, rank 0: ")
    assert left or found["a"]["kind"] == "dense"  # which has no records of the steps between


def test_figures_are_those_of_exports(
    capsys: pytest.CaptureFixture[str], sharded_run: tuple[str, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path
) -> None:
    """Two steps of two ranks' experts, and of one rank that goes on alone: elements and largest differences of whole tensors."""
    url = shutil.copytree(sharded_run[0], tmp_path / "run")
    ours = DenseCheckpoint(str(url), every_n_steps=2, keep=9)
    run_world(1, lambda _: bool(train(SmallMoE(), ours, steps=6, strategy=MoEStrategy())), process_group=False)
    found = told(capsys, f"{url}@4", f"{url}@6", status=1)
    assert "ranks: 2 in A, 1 in B" in found["beside"]
    files = [tmp_path / f"{step}.safetensors" for step in (4, 6)]
    for path, step in zip(files, ("4", "6"), strict=True):
        assert main(["export", str(url), str(path), "--step", step]) == 0
    before, after = map(load_file, files)
    for name, tensor in before.items():
        gaps = (tensor.double() - after[name].double()).abs()
        rows = [row for row in found["tensors"] if row["tensor"] == name]
        assert sum(row["differing"] for row in rows) == int((tensor != after[name]).sum()) > 0
        assert max(row["largest"] for row in rows) == float(gaps.max())
        for row in rows:
            place = tuple(row["at"])
            assert (row["a"], row["b"]) == (float(tensor[place]), float(after[name][place]))


def test_a_partial_generation_is_compared_as_far_as_operators_are_equally_old(
    capsys: pytest.CaptureFixture[str], partial_run: str
) -> None:
    """Generation 5 is that of step 4 with two older experts, which are named."""
    found = told(capsys, f"{partial_run}@4", f"{partial_run}@5", status=0)
    assert found["not_compared"] == ["moe/expert.1", "moe/expert.2"]
    assert found["compared"] > 2


def test_damage_is_that_of_its_side(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever of the two URLs has it; of a marker, and of a segment."""
    other = tmp_path / "other"
    train(Small(), DenseCheckpoint(str(other), keep=1), steps=2)
    for kind in ("*.done", "*.safetensors"):
        bad = tmp_path / f"bad-{len(kind)}"
        shutil.copytree(tiny_run, bad)
        for path in bad.rglob(kind):
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        for sides in ((bad, other), (other, bad)):
            assert main(["diff", *map(str, sides)]) == 2
            said = capsys.readouterr().err
            assert (bad.as_uri() in said, other.as_uri() in said) == (True, False)


def test_what_is_no_number_comes_first() -> None:
    """NaN against a number, another NaN, infinity; equal bits of a NaN are equal."""
    a, b = torch.zeros(4, 5), torch.zeros(4, 5)
    a[0, 1] = b[0, 1] = float("nan")
    b[1, 2], b[2, 3], b[3, 4] = 1.0, float("inf"), float("nan")
    (row,) = _diff.worst_first(_diff._difference("x", "y", a, b, [((0, 0), (4, 5))]))
    assert (row["differing"], row["numel"], row["largest"], row["at"], row["b"]) == (3, 20, "nan", [3, 4], "nan")
    counts = _diff._difference("x", "y/step", a, b, [((0, 0), (4, 5))])
    rows = [*counts, *_diff._difference("x", "y", a, b, [((1, 1), (2, 3))])]
    assert [each["tensor"] for each in _diff.worst_first(rows)] == ["y", "y/step"]  # counts differ by more than weights
    (row,) = _diff.worst_first(rows[1:])
    assert (row["differing"], row["numel"], row["largest"], row["at"]) == (2, 6, "inf", [2, 3])


def test_a_step_that_is_not_kept_is_answered_with_those_that_are(
    capsys: pytest.CaptureFixture[str], runs: tuple[str, str, str], tiny_run: Path
) -> None:
    """Of one run, and of two that have no step in common."""
    assert main(["diff", f"{runs[0]}@77", runs[1]]) == 2
    assert "no committed generation of step 77. Committed steps: [" in capsys.readouterr().err
    assert main(["diff", runs[0], f"{tiny_run}@2"]) in {1, 2}
    capsys.readouterr()
    assert main(["diff", f"{runs[0]}@x", runs[1]]) == 2  # a folder of that name
