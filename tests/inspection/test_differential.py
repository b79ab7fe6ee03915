"""Generations of differences: listed, verified, inspected, and exported as the state that they lead to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.inspection import export, verify
from lightning_moe_ckpt.inspection._answers import generation_rows
from lightning_moe_ckpt.policies import DifferentialMode
from lightning_moe_ckpt.storage import RunView, open_backend


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of one training, stored in bases of steps 1 and 6 with differences between, and dense at every step."""
    root = tmp_path_factory.mktemp("chained")
    modes: dict[str, DifferentialMode] = {"chained": "lossless", "rounded": "bf16", "compressed": "compressed"}
    for name in ("dense", *modes):
        torch.manual_seed(3)
        url = str(root / name)
        dense = DenseCheckpoint(url, every_n_steps=1, keep=20, overhead_target=None)
        chained = DifferentialCheckpoint(url, every_n_steps=5, batch=2, keep=20, mode=modes.get(name, "lossless"))
        train(Small(), dense if name == "dense" else chained, steps=8)
    return root / "chained", root / "dense"


def test_they_are_listed_with_what_they_follow_on(runs: tuple[Path, Path]) -> None:
    """Differences of steps 2 and 3, then 4 and 5, on the base of step 1."""
    rows = generation_rows(RunView.open(open_backend(str(runs[0]))))
    found = {row["step"]: (row["kind"], row["first_step"], [need["step"] for need in row["needs"]]) for row in rows}
    assert found[1] == ("dense", 1, [])
    assert found[3] == ("differential", 2, [1])
    assert found[5] == ("differential", 4, [1, 3])
    assert found[6] == ("dense", 6, [])


@pytest.mark.parametrize("step", [3, 5])
def test_what_is_exported_is_the_state_of_the_step(runs: tuple[Path, Path], tmp_path: Path, step: int) -> None:
    """Weights and optimizer, to the last bit those that a dense generation of the step has."""
    for run in runs:
        assert (
            main(["export", str(run), str(tmp_path / f"{run.name}.safetensors"), "--step", str(step), "--optimizer"])
            == 0
        )
    for kind in ("safetensors", "optimizer.safetensors"):
        found, wanted = (load_file(tmp_path / f"{run.name}.{kind}") for run in runs)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("name", "code"), [("rounded", "BF16"), ("compressed", "U8")])
def test_lossy_gradients_lead_to_nearly_the_state(
    runs: tuple[Path, Path], tmp_path: Path, name: str, code: str
) -> None:
    """Not to its bits; what they were made into is the type of the records, and what checks them is content."""
    rounded = runs[0].parent / name
    assert main(["verify", str(rounded)]) == 0
    for run in (rounded, runs[1]):
        assert main(["export", str(run), str(tmp_path / f"{run.name}.safetensors"), "--step", "5", "--optimizer"]) == 0
    found, wanted = (load_file(tmp_path / f"{run}.optimizer.safetensors") for run in (name, "dense"))
    assert not all(torch.equal(found[each], wanted[each]) for each in wanted)
    for each in wanted:
        torch.testing.assert_close(found[each], wanted[each], rtol=0.01 if code == "BF16" else 0.1, atol=1e-3)
    view = RunView.open(open_backend(str(rounded)))
    (commit,) = (row.commit for row in view.generations() if row.generation.step == 5)
    assert commit is not None
    records = [record for segment in view.read_marker(commit, 0).segments for record in segment.records]
    assert {record.dtype for record in records if record.kind == "delta"} == {code}


def test_commands_know_them(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever looks is told what a generation needs."""
    assert main(["ls", str(runs[0])]) == 0
    assert main(["inspect", str(runs[0]), "--step", "5"]) == 0
    assert main(["verify", str(runs[0])]) == 0
    said = capsys.readouterr().out
    assert "differential" in said
    assert "references" in said


def test_a_bad_difference_is_named(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """By whoever needs it: the generation of its own, and those that follow on it."""
    root = Path(shutil.copytree(runs[0], tmp_path / "run"))
    (path,) = root.glob("snap/*/*/rank00000.000000000002.safetensors")
    data = bytearray(path.read_bytes())
    data[4100] ^= 1
    path.write_bytes(data)
    backend = open_backend(str(root))
    bad = {problem.generation.split(" ")[1] for problem in verify(backend).problems}
    assert {"3", "5"} <= bad
    assert not {"1", "6"} & bad
    with pytest.raises(Corrupt, match="step 2, on which it follows, is bad"):
        export(backend, tmp_path / "m.safetensors", step=5)
