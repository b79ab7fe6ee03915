"""`moe-ckpt placement` shows what a cluster survives, for people and for programs."""

from __future__ import annotations

import json

import pytest

from lightning_moe_ckpt.cli import main

CLUSTER = ["placement", "--nodes", "16", "--replicas", "1", "--racks", "4", "--expert-parallel", "8"]


def test_json_has_probabilities_and_every_holder(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes first, then racks; holders by rank."""
    assert main([*CLUSTER, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    shown = [(each["level"], each["lost"], round(each["probability"], 4)) for each in document["survival"]]
    assert shown[:4] == [("node", 1, 1), ("node", 2, 0.9333), ("node", 3, 0.8), ("node", 4, 0.6154)]
    assert [each[:2] for each in shown[4:]] == [("rack", k) for k in range(1, 5)]
    assert len(document["holders"]) == 128
    assert all(holder % 8 == owner % 8 for owner, holders in enumerate(document["holders"]) for holder in holders)
    assert (document["within_data_parallel"], document["leaves_rack"]) == (1, 1)
    assert (document["most_held"], document["least_held"]) == (1, 1)
    one, two = document["copies"]
    assert (one["replicas"], one["generations"], one["survival"]) == (1, 4, document["survival"])
    assert (two["replicas"], two["generations"]) == (2, 6)
    assert [round(each["probability"], 4) for each in two["survival"][:4]] == [1, 1, 0.9857, 0.9445]


def test_table_tells_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """And how copies are spread; racks only where there is more than one."""
    assert main([*CLUSTER, "--most", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(
        text in shown for text in ("1 copy of each rank", "2 nodes", "93.33%", "1 rack", "100%", "keeps 1 copies")
    )
    assert "3 nodes" not in shown
    assert main(["placement", "--nodes", "3", "--ranks-per-node", "1"]) == 0
    assert "1 rack" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "2", "--replicas", "2"], "`replicas=2` needs 3 nodes"),
        (["--nodes", "2", "--racks", "3"], "`--racks 3` is more than `--nodes 2`"),
        (["--nodes", "2", "--expert-parallel", "5"], "does not divide the 16 processes"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, in words and as a document."""
    assert main(["placement", *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert says in json.loads(out)["error"]["message"]


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_counts_are_one_or_more(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As every argument of a command."""
    with pytest.raises(SystemExit):
        main(["placement", "--nodes", number])
    assert "must be a number of 1 or more" in capsys.readouterr().err
