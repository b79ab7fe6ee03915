"""`moe-ckpt bench peers`: what its figures are, its real command, and systems that cannot be had."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import peers, peers_systems
from benchmarks.peers import Paired, PeerFigure, chosen, draw, ranked, row_of, write_page
from benchmarks.peers_environments import interpreter_of
from benchmarks.peers_fits import PeerKills
from lightning_moe_ckpt.benchmarks._benchmark import Machine
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError

TINY = [
    *("--rounds", "1", "--steps", "4", "--settle", "2", "--every", "2", "--peer-kills", "1"),
    *("--blocks", "1", "--dim", "32", "--experts", "4", "--batch-size", "2"),
]
OPTIONS = SimpleNamespace(blocks=1, dim=32, experts=4, every=4, rounds=6)


def figure(system: str, median: float = 2e-3, *, half: float = 1e-4, **more: Any) -> PeerFigure:
    """Row of a system whose interval reaches `half` to both sides."""
    added = Paired(median=median, low=median - half, high=median + half, coverage=0.97)
    place = "storage" if "storage" in system or "dcp" in system else "memory"
    return PeerFigure(system=system, label=system, place=place, versions=(), added=added, beside=added, **more)


def kills(**more: Any) -> PeerKills:
    """Kills of a system that does all right."""
    right: dict[str, Any] = {"state_equal": True, "steps_equal": True, "flip": "noticed", "flip_said": "from step 8"}
    return PeerKills(**{"killed_at": [15, 23], "resumed_from": [12, 20], "seconds": [0.5, 0.7], **right, **more})


def test_a_figure_is_the_median_of_differences_with_its_interval() -> None:
    """Six numbers cover the median from end to end in 1 - 2/64; nine without the outermost on each side."""
    paired = Paired.of([5.0, 1.0, 3.0, 2.0, 6.0, 4.0])
    assert (paired.median, paired.low, paired.high, paired.coverage) == (3.5, 1.0, 6.0, 1 - 2 / 64)
    nine = Paired.of([float(number) for number in range(9)])
    assert (nine.median, nine.low, nine.high) == (4.0, 1.0, 7.0)
    assert nine.coverage == 1 - 2 * (1 + 9) / 2**9


def test_intervals_hold_the_median_as_often_as_they_say() -> None:
    """Of skewed numbers too, whose median is not their mean."""
    draw_one = random.Random(0)
    held = 0
    for _ in range(2000):
        paired = Paired.of([draw_one.expovariate(1.0) for _ in range(9)])
        held += paired.low <= 0.6931 <= paired.high
    assert held / 2000 == pytest.approx(paired.coverage, abs=0.015)


@pytest.mark.parametrize(
    ("differences", "resolved"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.0, 1.0], True),
        ([-1.0, 1.5, 0.2, 0.4, 0.3, 0.1], False),
        ([1.0, 1.0], False),
        ([0.0], False),
    ],
)
def test_an_interval_wider_than_its_value_is_not_resolved(differences: list[float], resolved: bool) -> None:
    """And two numbers resolve nothing, even if they are equal."""
    assert Paired.of(differences).is_resolved is resolved
    row = row_of(replace(figure("dcp"), added=Paired.of(differences)))
    assert ("not resolved" in row[1]) is not resolved


def test_rounds_are_paired_around_turns_without_checkpoints() -> None:
    """A drift that goes on through a round cancels: what is added stays."""
    clock = iter(range(1_000))

    def turn(added: float) -> Any:
        return SimpleNamespace(seconds=added + 0.1 * next(clock), beside_seconds=0.0, hook_seconds=0.0, nbytes=0)

    options = SimpleNamespace(**vars(OPTIONS), settle=4, steps=8, batch_size=1)
    row = peers._Row("dcp", options, (Path("folder"), Path("memory")))
    row.environment = SimpleNamespace(turn=lambda _: turn(5.0))  # type: ignore[assignment]
    for _ in range(3):
        row.take_round(lambda: turn(0.0))
    added = row.figure().added
    assert added is not None
    assert (added.low, added.median, added.high) == pytest.approx((5.0, 5.0, 5.0))


def test_a_row_of_ours_says_where_it_is_behind() -> None:
    """Of steps where the intervals are apart, of all else by the median; the best of its own place counts."""
    ours = figure(
        "dense-memory", 3e-3, hook_seconds=1e-3, safe_seconds=0.1, memory_nbytes=9, kills=kills(seconds=[2.0])
    )
    near = figure("dlrover-memory", 2.9e-3, hook_seconds=2e-3, safe_seconds=0.2, memory_nbytes=4, kills=kills())
    lost = figure("lm-resiliency-memory", 1e-3, hook_seconds=2e-3, safe_seconds=0.2, kills=kills(resumed_from=[0, 0]))
    far = figure("dcp", 1e-4, hook_seconds=1e-5)
    said = {each.system: each.behind for each in ranked([ours, near, far])}
    assert said == {
        "dense-memory": ("host memory (dlrover-memory)", "after SIGKILL (dlrover-memory)"),
        "dlrover-memory": (),
        "dcp": (),
    }
    assert ranked([ours, near, lost])[0].behind[0] == "step (lm-resiliency-memory)"
    assert "all: no copy is left" in row_of(lost)


def test_what_was_not_measured_is_a_row(tmp_path: Path) -> None:
    """In the table of a page too, which has its other text as before; and the picture leaves it out."""
    rows = [
        figure("none"),
        figure("dcp", kills=kills(steps_equal=False)),
        replace(figure("nvrx-local"), added=None, missing="no pip"),
    ]
    page = tmp_path / "page.md"
    page.write_text(
        "above\n<!-- written by `moe-ckpt bench peers` -->\nthe table before\n<!-- end of peers -->\nbelow\n"
    )
    for _ in range(2):  # the second table is in the place of the first
        write_page(page, rows, Machine.read(), OPTIONS)
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "the table before" not in text
    assert text.count("| nvrx-local, memory | not measured: no pip |") == 1
    assert "those saved; later steps got other data" in text
    draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    page.write_text("nothing")
    with pytest.raises(ConfigurationError, match="end of peers"):
        write_page(page, rows, Machine.read(), OPTIONS)


def test_an_unknown_name_lists_all() -> None:
    """Before anything is installed."""
    assert chosen("dcp,none,dcp") == ["none", "dcp"]
    with pytest.raises(ConfigurationError, match=r"--peers dlrovr`: there are none, dlrover-memory"):
        chosen("dcp,dlrovr")


def test_what_cannot_be_installed_says_pips_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is half made is made anew by the next start."""
    monkeypatch.setitem(peers_systems.REQUIREMENTS, "dlrover", (f"{tmp_path}/no-such-package.whl",))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cannot be installed here: .*no-such-package"):
            interpreter_of("dlrover", tmp_path)
    assert not [*tmp_path.glob("*/made")]


@pytest.mark.soak
def test_systems_are_measured_and_killed_by_the_command(tmp_path: Path) -> None:
    """What is here, and one that cannot be installed; kills lose steps and no bits, and digests notice the bit."""
    names = ["none", "ckpt", "dcp", "dlrover-memory", "dense-memory", "dense-storage"]
    command = [sys.executable, "-m", "lightning_moe_ckpt.cli", "bench", "peers", "--json", *TINY]
    found = subprocess.run(  # our own command
        [*command, "--peers", ",".join(names), "--envs", str(tmp_path)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "",
            "PIP_EXTRA_INDEX_URL": "",
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "installing dlrover==" in found.stderr
    rows = {row["system"]: row for row in json.loads(found.stdout)["peers"]}
    assert [*rows] == names
    assert "cannot be installed here" in rows["dlrover-memory"]["missing"]
    assert rows["dlrover-memory"]["added"] is None
    killed = {name: rows[name]["kills"] for name in names if rows[name]["kills"]}
    assert killed.keys() == {*names} - {"dlrover-memory"}
    assert killed["none"]["resumed_from"] == [0]
    assert all(0 < each["resumed_from"][0] <= each["killed_at"][0] for name, each in killed.items() if name != "none")
    assert {name for name, each in killed.items() if each["state_equal"]} == killed.keys()
    assert {name for name, each in killed.items() if each["steps_equal"]} == killed.keys() - {"ckpt"}
    assert {name: killed[name]["flip"] for name in ("ckpt", "dense-memory", "dense-storage")} == {
        "ckpt": "not noticed", "dense-memory": "noticed", "dense-storage": "noticed",
    }  # fmt: skip
    assert rows["dense-storage"]["nbytes_per_step"] > 0
