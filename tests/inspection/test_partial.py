"""Generations that reference, from outside: what they need is shown, read, exported as it was, and named where it is bad."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from door import StoredMarker, commit_key, marker_key
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import Commit, PosixBackend, RunStore, carry_forward, digest_of, open_backend

Say = Callable[..., dict[str, Any]]
OLD = [1, 2]
"""Experts for which generation 5 refers to step 2."""


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """The document a command writes."""

    def run(*argv: str, status: int = 0) -> dict[str, Any]:
        assert main([*argv, "--json"]) == status
        return dict(json.loads(capsys.readouterr().out))

    return run


@pytest.fixture
def copy(partial_run: str, tmp_path: Path) -> Path:
    """A run that may be damaged."""
    return Path(shutil.copytree(partial_run, tmp_path / "copy"))


def test_ls_says_what_a_generation_needs(say: Say, partial_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the others need nothing."""
    rows = say("ls", partial_run)["generations"]
    assert [(row["step"], row["kind"], row["needs"], row["usable"]) for row in rows] == [
        (5, "partial", [{"step": 2, "incarnation": 1}], True),
        (4, "dense", [], True),
        (2, "dense", [], True),
    ]
    assert main(["ls", partial_run]) == 0
    assert "needs" in capsys.readouterr().out


def test_inspect_says_who_supplies_each_operator_and_how_old_it_is(
    say: Say, partial_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Referenced experts with the step they are of, and the files they are in."""
    found = say("inspect", partial_run)
    ages = {row["operator"]: (row["supplied_by"]["step"], row["steps_old"]) for row in found["operators"]}
    assert {name: age for name, age in ages.items() if age != (5, 0)} == {f"moe/expert.{i}": (2, 3) for i in OLD}
    assert {"moe/expert.0", "moe/expert.3"} < set(ages)
    full = {row["operator"]: row["kinds"]["full"]["steps"] for row in found["operators"]}
    assert full["moe/expert.1"] == [2]
    assert full["moe/expert.0"] == [5]
    assert [(row["rank"], row["step"], row["operators"]) for row in found["referenced"]] == [(0, 2, 1), (1, 2, 1)]
    assert main(["inspect", partial_run]) == 0
    out = capsys.readouterr().out
    assert "from steps 2" in out
    _, _, older = out.partition("Files in snap/000000000002/i000001-")
    assert "rank00001.000000000002.safetensors" in older


def exported(url: str, step: int, out: Path) -> dict[str, torch.Tensor]:
    assert main(["export", url, str(out), "--step", str(step), "--optimizer", "--force"]) == 0
    return load_file(out) | load_file(out.with_suffix(".optimizer.safetensors"))


def test_an_export_has_every_expert_as_it_was_stored_last(partial_run: str, tmp_path: Path) -> None:
    """Weights and moments, bit for bit, of step 2 or 4; the step count, of which there is one, is that of step 4."""
    found, new, old = (exported(partial_run, step, tmp_path / f"{step}.safetensors") for step in (5, 4, 2))
    assert found.keys() == new.keys()
    stacked = {name for name in new if name.startswith(("moe.w", "moe.b")) and new[name].dim() > 1}
    assert {"moe.w1", "moe.b2", "moe.w1/exp_avg", "moe.w2/exp_avg_sq"} <= stacked
    for name, tensor in found.items():
        for expert, part in enumerate(tensor) if name in stacked else ():
            assert torch.equal(part, (old if expert in OLD else new)[name][expert]), (name, expert)
            assert not torch.equal(old[name][expert], new[name][expert]), "the test could not tell"
        assert name in stacked or torch.equal(tensor, new[name]), name
    assert found["moe.w1/step"] == 4


def test_an_export_says_which_versions_are_in_it(
    say: Say, partial_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the file and on screen; a checkpoint that references nothing has no such key."""
    older = {f"moe/expert.{i}": 2 for i in OLD}
    document = say("export", partial_run, str(tmp_path / "m.safetensors"))
    assert "operators older than step 5: 2 of step 2" in document["notes"]
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["lightning_moe_ckpt_versions"]) == older
    assert main(["export", partial_run, str(tmp_path / "m.ckpt")]) == 0
    checkpoint = torch.load(tmp_path / "m.ckpt", weights_only=True)
    assert checkpoint["lightning_moe_ckpt_versions"] == older
    states = checkpoint["optimizer_states"][0]["state"]
    assert {float(state["step"]) for state in states.values()} == {4.0}
    assert main(["export", partial_run, str(tmp_path / "dense.ckpt"), "--step", "4"]) == 0
    assert "lightning_moe_ckpt_versions" not in torch.load(tmp_path / "dense.ckpt", weights_only=True)
    capsys.readouterr()


def test_verify_reads_each_file_once(partial_run: str) -> None:
    """Those of all three generations are good; what is referenced lies in files that were read already."""
    verdict = verify(open_backend(partial_run))
    assert verdict.sound
    assert verdict.num_files == len(list(Path(partial_run).rglob("*.safetensors")))


def test_verify_of_one_generation_reads_what_it_borrows(say: Say, copy: Path) -> None:
    """Its own two files and two of step 2; damage there is named, with the generation and the file."""
    assert say("verify", str(copy), "--step", "5")["num_files"] == 4
    path = next((copy / "snap/000000000002").rglob("rank00001*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (problem,) = say("verify", str(copy), "--step", "5", status=1)["problems"]
    assert problem["generation"] == "step 5 (incarnation 2)"
    assert re.match(
        r"needs step 2 \(incarnation 1\): snap/000000000002/i000001-[0-9a-f]{12}/rank00001", problem["reason"]
    )
    both = say("verify", str(copy), status=1)["problems"]
    assert sorted(each["generation"] for each in both) == ["step 2 (incarnation 1)", "step 5 (incarnation 2)"]


@pytest.mark.parametrize("name", ["rank00000.000000000002.safetensors", "_COMMITTED"])
def test_what_lost_something_it_needs_is_not_usable(say: Say, copy: Path, name: str) -> None:
    """By `ls`, by `verify`, and for an export, which takes the one before."""
    next(copy.rglob(f"snap/000000000002/i000001-*/{name}")).unlink()
    rows = {row["step"]: row for row in say("ls", str(copy))["generations"]}
    assert not rows[5]["usable"]
    assert rows[5]["why_not"].startswith("needs step 2 (incarnation 1), which cannot be read")
    assert rows[4]["usable"]
    assert any(p["generation"].startswith("step 5") for p in say("verify", str(copy), status=1)["problems"])
    assert say("export", str(copy), str(copy / "m.safetensors"))["step"] == 4


def test_what_is_only_there_for_others_is_no_damage(say: Say, copy: Path) -> None:
    """Somebody gives up all but the newest: 4 goes, 2 stays for 5, which says so."""
    found = say("gc", str(copy), "--keep-last", "1")
    assert {row["step"]: row["reason"] for row in found["stays"]} == {
        2: "needed by step 5 (incarnation 2)",
        4: "among the last 2",
        5: "among the last 2",
    }
    store = PosixBackend(copy)
    assert verify(store).sound
    again = say("gc", str(copy))
    assert {row["step"]: row["reason"] for row in again["stays"]}[2].endswith("needed by step 5 (incarnation 2)")


def name_spares(root: Path) -> None:
    """Generation 5 refers to step 4, and names the copies in step 2 as well."""
    backend = open_backend(str(root))
    store = RunStore.open(backend, resume="must")
    commits = {commit.generation.step: commit for commit in store.candidates()}
    names = [f"moe/expert.{i}" for i in OLD]
    written = []
    for rank in range(commits[5].world_size):
        older = {step: carry_forward(store.read_marker(commits[step], rank), names) for step in (2, 4)}
        marker = replace(store.read_marker(commits[5], rank), referenced=older[4], spares=older[2])
        backend.put(marker_key(marker.generation, rank), marker.to_bytes())
        written.append(StoredMarker(marker, digest_of(marker.to_bytes())))
    backend.put(commit_key(commits[5].generation), Commit.of(written).to_bytes())


def turn_a_bit(root: Path, step: int, operator: str, *, last: bool = False) -> None:
    """In its first record, or its last one."""
    store = RunStore.open(open_backend(str(root)), resume="must")
    commit = next(candidate for candidate in store.candidates() if candidate.generation.step == step)
    segments = [store.read_marker(commit, rank).segments[0] for rank in range(commit.world_size)]
    found = [(s, r) for s in segments for r in s.records if r.operator == operator and r.nbytes > 1]
    segment, record = found[-1 if last else 0]
    path = root / segment.key
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[record.offset] ^= 1
    path.write_bytes(data)


def test_an_export_takes_the_older_copy_of_what_is_bad(
    copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the expert, weights and moments; a warning names both copies, the file says which one is in it."""
    name_spares(copy)
    out, spared = tmp_path / "m.safetensors", "moe/expert.1"
    whole, old = exported(str(copy), 5, out), exported(str(copy), 2, tmp_path / "2.safetensors")
    turn_a_bit(copy, 4, spared, last=True)
    found = exported(str(copy), 5, out)
    for name, tensor in found.items():
        stacked = name.startswith(("moe.w", "moe.b")) and tensor.dim() > 1
        for expert, part in enumerate(tensor) if stacked else ():
            assert torch.equal(part, (old if expert == 1 else whole)[name][expert]), (name, expert)
        assert stacked or torch.equal(tensor, whole[name]), name
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(
        f"{spared}: its copy of step 4 (incarnation 1) is bad, that of step 2 (incarnation 1) is taken: "
    )
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["lightning_moe_ckpt_versions"]) == {spared: 2, "moe/expert.2": 4}
    turn_a_bit(copy, 2, spared, last=True)
    assert main(["export", str(copy), str(out), "--step", "5", "--optimizer", "--force"]) != 0
    assert "digest" in capsys.readouterr().err


def test_verify_counts_copies(say: Say, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of each expert; one is bad, and the operator is down to one; both are, and it is lost."""
    name_spares(copy)
    good = say("verify", str(copy))
    assert (good["sound"], good["num_single"]) == (True, 0)
    turn_a_bit(copy, 4, "moe/expert.1")
    one = say("verify", str(copy), "--step", "5", status=1)
    assert [problem["reason"].split(":")[0] for problem in one["problems"]] == ["needs step 4 (incarnation 1)"]
    assert one["num_single"] == 1
    assert main(["verify", str(copy), "--step", "5"]) == 1
    assert "one good copy only, of those taken in turns: 1" in capsys.readouterr().out
    turn_a_bit(copy, 2, "moe/expert.1")
    reasons = [problem["reason"] for problem in say("verify", str(copy), "--step", "5", status=1)["problems"]]
    assert any(reason.startswith("has older copies in step 2 (incarnation 1): snap/") for reason in reasons)
    assert reasons[-1] == "no good copy is left of 1 operators, first moe/expert.1"
