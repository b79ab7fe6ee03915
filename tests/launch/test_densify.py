"""`moe-ckpt densify` makes what a killed run has left dense, by real processes; the bits are those of a run left in peace."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from door import DIRECTORY_VARIABLE
from torch import Tensor
from torch.utils import _pytree as pytree

from launch._jobs import Ended, Job
from lightning_moe_ckpt.cli import main

SCRIPT = Path(__file__).with_name("to_densify.py")
STEPS = 12
CASES = {"one": (1, ""), "three": (3, ""), "experts": (4, "experts"), "stages": (2, "stages")}


def trained(folder: Path, ranks: int, layout: str, *asked: str, name: str = "console") -> Ended:
    """A job that has ended; `asked` are names of files that say what it is to do."""
    folder.mkdir(exist_ok=True)
    for each in asked:
        (folder / each).touch()
    ended = Job(
        folder, ranks, STEPS, str(ranks), layout, program=SCRIPT, max_failures="0", flush_timeout=0.0, name=name
    ).end()
    for each in asked:
        (folder / each).unlink()
    return ended


def densify(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> Ended:
    command = ["densify", (folder / "run").as_uri(), *options, "--", str(SCRIPT), str(folder), str(STEPS), *arguments]
    return Job(folder, 0, STEPS, work=lambda: main(command), name="densify").end()


def states(optimizer: dict[str, Any]) -> list[Any]:
    """What an optimizer has, by parameter, and the settings of its group; of all stages together."""
    stages = optimizer.get("pipeline_stages", [optimizer])
    (group,) = stages[0]["param_groups"]
    found = [state for stage in stages for _, state in sorted(stage["state"].items())]
    return [*found, {key: value for key, value in group.items() if key != "params"}]


def same(one: Path, other: Path) -> bool:
    """Whether two of Lightning's checkpoints have the same weights and the same state of the optimizer."""
    found = [torch.load(path, weights_only=True) for path in (one, other)]
    wanted, got = (
        {"weights": dict(each["state_dict"]), "optimizer": states(*each["optimizer_states"])} for each in found
    )
    leaves, others = (dict(pytree.tree_leaves_with_path(each)) for each in (wanted, got))
    assert leaves.keys() == others.keys()
    return all(torch.equal(a, others[at]) if isinstance(a, Tensor) else a == others[at] for at, a in leaves.items())


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """Folders of runs that nobody kills, with a checkpoint of Lightning's of every step, by ranks and layout."""

    def finished(ranks: int, layout: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "job"
        ended = trained(folder, ranks, layout, "whole")
        assert ended.code == 0, ended.output
        return folder

    return cache(finished)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case", ["experts", "stages", *(pytest.param(case, marks=pytest.mark.soak) for case in ("one", "three"))]
)
def test_a_killed_run_is_made_dense(
    tmp_path: Path, peaceful: Callable[[int, str], Path], case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is stored has the bits that the run left in peace had at this step, and the run goes on from there with its bits.

    `experts` has two replicas of each, so that an ordinary run leaves out the case of replicas alone.
    """
    ranks, layout = CASES[case]
    whole, killed = peaceful(ranks, layout), tmp_path / "killed"
    ended = trained(killed, ranks, layout, "die")
    assert ended.code == 1, ended.output
    url = (killed / "run").as_uri()
    assert main(["export", url, str(tmp_path / "export.ckpt")]) == 2
    assert f"moe-ckpt densify {url} -- SCRIPT" in capsys.readouterr().err
    ended = densify(killed, str(ranks), layout)
    assert ended.code == 0, ended.output
    said = re.search(
        r"^densified: generation step (\d+) of run \w+; (\d) processes, (\d) steps replayed$",
        ended.output,
        re.MULTILINE,
    )
    assert said is not None, ended.output
    step, processes, replayed = map(int, said.groups())
    assert (processes, replayed > 0) == (ranks, True)
    assert main(["export", url, str(tmp_path / "export.ckpt")]) == 0
    assert same(whole / f"{step}.ckpt", tmp_path / "export.ckpt")
    resumed = trained(killed, ranks, layout, name="resumed")
    assert resumed.code == 0, resumed.output
    assert f"resumed from step {step}" in resumed.output
    assert f"resumed from step {step}, by training again" not in resumed.output
    assert same(whole / "end.ckpt", killed / "end.ckpt")


def test_memory_that_is_ahead_of_storage_counts(tmp_path: Path, peaceful: Callable[[int, str], Path]) -> None:
    """Storage is dense, but older than what this node has: the newest comes to storage, without a step of training."""
    assert trained(tmp_path, 1, "at_once", "die", "full").code == 1
    assert max(int(each.name) for each in (tmp_path / "run" / "snap").iterdir()) < 10
    ended = densify(tmp_path, "1", "at_once")
    assert ended.code == 0, ended.output
    assert "densified: generation step 10 " in ended.output
    assert "replayed" not in ended.output.partition("densified")[2]
    assert main(["export", (tmp_path / "run").as_uri(), str(tmp_path / "export.ckpt")]) == 0
    assert same(peaceful(1, "") / "10.ckpt", tmp_path / "export.ckpt")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two ranks that were killed a moment ago."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY_VARIABLE, str(tmp_path_factory.mktemp("memory")))
        assert trained(folder, 2, "", "die").code == 1
    return folder


@pytest.fixture
def moved(left: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to which no memory belongs: all nodes are gone."""
    return Path(shutil.copytree(left, tmp_path / "moved"))


def log_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "_log").iterdir())


def test_a_run_that_seems_to_train_is_left_alone(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until --force; from storage then, and by a script that leaves devices and accelerator to Lightning."""
    url, before = (moved / "run").as_uri(), log_of(moved)
    assert main(["densify", url, "--", "no such script"]) == 2
    assert "seems to train still" in capsys.readouterr().err
    assert log_of(moved) == before
    ended = densify(moved, "auto", options=("--force",))
    assert ended.code == 0, ended.output
    assert "; 2 processes, 3 steps replayed\n" in ended.output
    assert main(["densify", url, "--", "no such script"]) == 0
    assert re.fullmatch(r"nothing to do: generation step 8 of run \w+ is dense\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["3"], ["`devices=3`", "SCRIPT ended with status 1", "devices=2, num_nodes=1"]),
        (["auto", "none"], ["SCRIPT ended, and its fit has resumed nothing here", "2 processes"]),
        (["2", "experts"], ["expert_parallel: 1 in the run, 2 now", "SCRIPT ended with status 1"]),
    ],
    ids=["devices", "callback", "experts"],
)
def test_a_script_that_does_not_train_as_the_run_did_is_told(
    moved: Path, arguments: list[str], said: list[str]
) -> None:
    """Other devices, no checkpoint callback, another strategy: an error and nothing stored; what is there stays."""
    before = sorted((moved / "run" / "snap").iterdir())
    ended = densify(moved, *arguments, options=("--force",))
    assert ended.code == 2, ended.output
    assert [text for text in said if text not in ended.output] == []
    assert sorted((moved / "run" / "snap").iterdir()) == before


def test_a_script_of_another_run_is_told(moved: Path, left: Path) -> None:
    """The run that its callback has does not notice."""
    before = log_of(left)
    command = ["densify", (moved / "run").as_uri(), "--force", "--", str(SCRIPT), str(left), str(STEPS), "2"]
    ended = Job(left, 0, STEPS, work=lambda: main(command), name="densify").end()
    assert ended.code == 2, ended.output
    assert "was given another URL than the callback of this script" in ended.output
    assert log_of(left) == before


def test_where_no_run_is_nothing_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so."""
    assert main(["densify", tmp_path.as_uri(), "--", "no such script"]) == 2
    assert "no such script" not in capsys.readouterr().err
