"""Every hostile history ends in the right bits, in an older generation with a warning, or in a clear error."""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from stored._hostile import World

from lightning_moe_ckpt.tiers import shared_directory


@pytest.fixture(autouse=True)
def _named_lives() -> None:
    """Each incarnation has a name of its own here."""


def ends_of(seed: int, root: Path) -> list[str]:
    """How the starts of one history ended."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-hostile-", dir=shared_directory()) as shared:
        world = World(root / str(seed), Path(shared), random.Random(seed))
        try:
            world.run(num_events=8)
        finally:
            world.end()
    return world.ends


@pytest.mark.parametrize("seed", [*range(3), 164, 172, 218, 272, 314, 390, 400])
def test_a_hostile_history_ends_well(seed: int, tmp_path: Path) -> None:
    """The last seven have late commits before a repair, memory whose name is gone, and a lost log with a bad manifest."""
    assert ends_of(seed, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_five_hundred_hostile_histories_end_well(first: int, tmp_path: Path) -> None:
    """All fifty of a part are run, then those that failed are named."""
    ends, failed = Counter[str](), dict[int, str]()
    for seed in range(first, first + 50):
        try:
            ends.update(ends_of(seed, tmp_path))
        except Exception as error:  # noqa: BLE001, PERF203  # whatever it is, the others run too
            failed[seed] = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{dict(ends)} of 50 histories\n")
    assert failed == {}
