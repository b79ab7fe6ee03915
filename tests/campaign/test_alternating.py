"""A policy of one file and one callback goes through killed runs like those of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaign._campaign import Campaigns
from campaign._partial_runs import KILL, Machines, restarts, two_level_setup


@pytest.mark.parametrize(
    ("placed", "lost"),
    [
        pytest.param((0,), (), id="a process"),
        pytest.param((0, 1, 2), ((1,),), id="a node", marks=pytest.mark.soak),
        pytest.param((0, 1, 2), ((0, 1, 2),), id="everything"),
    ],
)
def test_after_a_kill_every_operator_is_as_old_as_promised(
    campaigns: Campaigns, folder: Path, placed: tuple[int, ...], lost: tuple[tuple[int, ...], ...]
) -> None:
    """Each bit of the dense part as of the newest generation, of each expert as of its turn; and tokens are counted rightly."""
    setup = two_level_setup(len(placed), len(placed), policy="alternating")
    found = restarts(campaigns, setup, Machines(folder, placed, lost=lost, replicas=0), KILL)
    promise = found.require(1)
    assert len(set(promise.experts.values())) == 2, "half of them are one generation older"
    found.require_turns(1, within=2)
    assert found.require_accounting().plt > 0
