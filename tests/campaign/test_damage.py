"""A checkpoint that was damaged after the run was killed: never loaded, the next older one is, and the log says why."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from campaign._campaign import Campaigns, lose_memory
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.testing import Attempt, AttemptFailed, Kill

Damage = Callable[[Sequence[Path]], None]
"""Ruins the newest of the committed generations, given oldest first."""

DENSE = Setup(checkpointing=Checkpointing(policy="dense", keep=3))
SPARSE = Setup(checkpointing=Checkpointing(policy="sparse", window=2, keep=3))
KILL = Kill(phase="after_batch_end", step=8, settle=10.0)


def truncate(generations: Sequence[Path]) -> None:
    segment = _segment(generations[-1])
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 100)


def flip_a_bit(generations: Sequence[Path]) -> None:
    _flip(_segment(generations[-1]))


def flip_a_bit_of_the_marker(generations: Sequence[Path]) -> None:
    _flip(next(generations[-1].glob("*.done")))


def flip_a_bit_of_the_manifest(generations: Sequence[Path]) -> None:
    _flip(generations[-1] / "_COMMITTED")


def uncommit(generations: Sequence[Path]) -> None:
    # Without a marker too, or the next incarnation would find that the generation is complete and commit it.
    (generations[-1] / "_COMMITTED").unlink()
    next(generations[-1].glob("*.done")).unlink()


def remove_a_segment(generations: Sequence[Path]) -> None:
    _segment(generations[-1]).unlink()


def put_an_older_segment_in_its_place(generations: Sequence[Path]) -> None:
    shutil.copyfile(_segment(generations[-2]), _segment(generations[-1]))


def put_an_older_generation_in_its_place(generations: Sequence[Path]) -> None:
    for path in generations[-1].iterdir():
        path.unlink()
    for path in generations[-2].iterdir():
        shutil.copyfile(path, generations[-1] / path.name)


def ruin_all(generations: Sequence[Path]) -> None:
    for generation in generations:
        _flip(_segment(generation))


def _segment(generation: Path) -> Path:
    return max(generation.glob("*.safetensors"))


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) // 8, len(raw), 512):  # some of them are of no record: space that a journal may grow into
        raw[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(raw)


def damage_then_train(setup: Setup, damage: Damage, life: Attempt) -> Mapping[str, Any]:
    """Ruin something at the start of the second incarnation, on a machine that is not the first one's, then train."""
    if life.index == 1 and life.rank == 0:
        lose_memory(life.workdir)
        root = Path(urlparse(life.url).path)
        generations = sorted(path.parent for path in root.glob("snap/*/*/_COMMITTED"))
        print(f"damaged generation {int(generations[-1].parent.name)}")
        damage(generations)
    return train(setup, life)


DAMAGES = [
    truncate,
    flip_a_bit,
    flip_a_bit_of_the_marker,
    flip_a_bit_of_the_manifest,
    uncommit,
    remove_a_segment,
    put_an_older_segment_in_its_place,
    put_an_older_generation_in_its_place,
]


BY_TURNS = [
    pytest.param(damage, setup, id=f"{damage.__name__}-{name}", marks=[pytest.mark.soak] if (index + turn) % 2 else [])
    for turn, (name, setup) in enumerate({"dense": DENSE, "sparse": SPARSE}.items())
    for index, damage in enumerate(DAMAGES)
]


@pytest.mark.parametrize(("damage", "setup"), BY_TURNS)
def test_the_next_older_generation_is_taken_and_the_log_says_why(
    campaigns: Campaigns, setup: Setup, damage: Damage
) -> None:
    """Nothing is lost but the steps since the generation before."""
    _, second = campaigns.check(setup, KILL, fit=partial(damage_then_train, setup, damage), may_complain=True)
    damaged = _number_after("damaged generation ", second.log())
    assert _number_after("resumes from step ", second.log()) < damaged
    assert f"step {damaged} (incarnation 1)" in second.log(), "the log names what was passed over"


def test_when_none_is_left_the_error_lists_each_with_its_reason(campaigns: Campaigns) -> None:
    """No incarnation starts over in silence above a run that cannot be read."""
    with pytest.raises(AttemptFailed) as caught:
        campaigns.run(DENSE, KILL, fit=partial(damage_then_train, DENSE, ruin_all))
    said = str(caught.value)
    assert "NoUsableGeneration" in said
    assert len([line for line in said.splitlines() if line.startswith("  - step ") and "digest" in line]) >= 2


def test_all_ranks_pass_over_what_one_of_them_cannot_read(campaigns: Campaigns) -> None:
    """The segment of one rank of three is damaged: no rank may resume from that generation."""
    setup = replace(SPARSE, world_size=3, model="stacked", options=(("num_experts", 6),), expert_parallel=3)
    lives = campaigns.check(setup, KILL, fit=partial(damage_then_train, setup, flip_a_bit), may_complain=True)
    damaged = _number_after("damaged generation ", lives[1].log())
    assert all(_number_after("resumes from step ", lives[1].log(rank)) < damaged for rank in range(3))


def _number_after(words: str, log: str) -> int:
    """The number that follows `words` in the one line that has them."""
    (line,) = [line for line in log.splitlines() if words in line]
    return int(line.split(words)[1].split()[0])
