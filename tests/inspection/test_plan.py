"""`moe-ckpt plan` says what a node needs, for people and for programs; `tests/planning/test_forecast.py` has the sums."""

from __future__ import annotations

import json

import pytest

from lightning_moe_ckpt.cli import main

MODEL = ["--params", "53.3e9", "--layers", "32", "--experts", "64", "--expert-params", "23e6", "--expert-parallel", "8"]
NODE = ["plan", *MODEL, "--nodes", "2", "--window", "6", "--replicas", "1"]


def test_the_table_has_every_purpose_of_a_node_of_eight_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """40 GB of state per GPU: the first example of `docs/sizing.md`, with the room that containers need."""
    assert main(NODE) == 0
    shown = capsys.readouterr().out
    rows = {" ".join(words[:-4]): words[-4:] for line in shown.splitlines() if len(words := line.split()) > 4}
    assert rows["generations"] == ["112.01", "GiB", "168.01", "GiB"]
    assert rows["room for other plans"] == ["1.75", "GiB", "2.63", "GiB"]
    assert rows["copies of other ranks"] == ["113.76", "GiB", "113.76", "GiB"]
    assert rows["a rank"] == ["227.51", "GiB", "284.39", "GiB"]
    assert rows["a node of 8 ranks"] == ["1820.10", "GiB", "2275.13", "GiB"]
    assert "full state of a rank: 37.23 GiB; a generation: 56.00 GiB in a window of 6" in shown
    assert "`--shm-size=1857g`" in shown
    assert "takes 3 where 4642 GiB are free" in shown


def test_json_is_the_same_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one rank by the number of generations, and of the node."""
    assert main([*NODE, "--redundancy", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["window"] == 6
    assert document["captured"] == pytest.approx(document["generation"] / 2, rel=0.01)
    for generations, purposes in document["purposes"].items():
        assert document["node"][generations] == 8 * sum(purposes.values())
    assert set(document["purposes"]["2"]) == {
        "generations", "room for other plans", "copies of other ranks",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "generations"),
    [
        (["--policy", "dense"], ["2", "3"]),
        (["--policy", "differential", "--batch", "4"], ["2", "3"]),
        (["--policy", "partial", "--k", "2"], ["4"]),
        (["--policy", "selective", "--budget", "40GB"], ["4"]),
        (["--budget", "15GB", "--planner", "algorithm1"], ["2", "3"]),
    ],
)
def test_every_policy_has_a_plan(policy: list[str], generations: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In pipeline stages, too: of half of the layers on half of the ranks, as many bytes each."""
    assert main([*NODE, *policy, "--layers", "4", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert list(whole["purposes"]) == generations
    assert main([*NODE, *policy, "--layers", "4", "--pipeline-parallel", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["full"] == pytest.approx(whole["full"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--params", "1e9"], "leave -46,104,000,000 of 1,000,000,000 for all else"),
        (["--config", "nowhere/config.json"], "transformers makes no language model of it"),
        (["--policy", "selective"], "measures its budget in training. Give one: `--budget`"),
        (["--experts", "60"], "`MoELayer(num_experts=60)` cannot be shared by `expert_parallel=8` ranks"),
        (["--replicas", "2"], "`replicas=2` needs 3 nodes"),
        (["--expert-parallel", "3"], "`expert_parallel=3` does not divide the 16 processes"),
        (["--pipeline-parallel", "3"], "`pipeline_parallel=3` does not divide the 16 processes"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, in words and as a document."""
    assert main([*NODE, *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert says in json.loads(out)["error"]["message"]
