"""Storage that has nothing yet: training goes on beside the first generation, and a crash before it is durable is no loss of the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from campaign._campaign import Campaigns
from campaign._partial_runs import partial_setup
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.storage import RunStore
from lightning_moe_ckpt.testing import Attempt, Kill, Seam


def train_beside_slow_storage(setup: Setup, slow: int, ranks: tuple[int, ...], life: Attempt) -> Mapping[str, Any]:
    """In the first `slow` lives nothing of these ranks arrives in storage, however long one waits."""
    if life.index < slow and life.rank in ranks:
        never = threading.Event()
        Seam(module=RunStore.__module__, attribute="RunStore.put_segment", replacement=lambda *_: never.wait()).apply()
    return train(setup, life)


def exact_setup(world_size: int, policy: Any) -> Setup:
    return Setup(
        model="stacked", world_size=world_size, batches=12, epochs=1, validate_every=None,
        checkpointing=Checkpointing(policy=policy, window=2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "policy", "ranks"),
    [
        (1, "sparse", (0,)),
        (3, "dense", (0,)),
        pytest.param(3, "sparse", (1, 2), marks=pytest.mark.soak),
        pytest.param(3, "dense", (1,), marks=pytest.mark.soak),
    ],
)
def test_what_memory_has_is_resumed_from_although_storage_has_nothing(
    campaigns: Campaigns, world_size: int, policy: str, ranks: tuple[int, ...]
) -> None:
    """Where some ranks have markers and where none has: the second start too, and the third has what the second stored."""
    setup = exact_setup(world_size, policy)
    kills = [Kill(phase="after_batch_end", step=8), Kill(phase="forward", step=10)]
    fit = partial(train_beside_slow_storage, setup, 1, ranks)
    first, second, _ = campaigns.check(setup, *kills, fit=fit)
    assert " is durable: " not in first.log()
    assert second.steps()[0] > 1, second.log()


@pytest.mark.parametrize(("world_size", "ranks"), [(1, (0,)), pytest.param(3, (2,), marks=pytest.mark.soak)])
def test_a_crash_before_anything_is_whole_anywhere_begins_anew(
    campaigns: Campaigns, world_size: int, ranks: tuple[int, ...]
) -> None:
    """Twice; what the run ends with is the end of the start that trained on."""
    setup = exact_setup(world_size, "sparse")
    fit = partial(train_beside_slow_storage, setup, 2, ranks)
    lives = campaigns.check(setup, Kill(phase="after_batch_end", step=1), Kill(phase="forward", step=1), fit=fit)
    assert [life.steps()[0] for life in lives] == [1, 1, 1]


@pytest.mark.parametrize(
    ("world_size", "expert_parallel", "step", "resumes"),
    [
        (1, 1, 3, False),
        (1, 1, 11, True),
        *(pytest.param(3, 3, *each, marks=pytest.mark.soak) for each in ((11, True), (3, False))),
    ],
)
def test_partial_generations_in_memory_count_once_they_hold_every_expert(
    campaigns: Campaigns, world_size: int, expert_parallel: int, step: int, resumes: bool
) -> None:
    """Before that the first generation has what they lack; without it they are of no use, and the run begins anew."""
    setup = partial_setup(world_size, expert_parallel)
    fit = partial(train_beside_slow_storage, setup, 1, tuple(range(world_size)))
    first, second = campaigns.run(setup, Kill(phase="after_batch_end", step=step), fit=fit)
    assert " is durable: " not in first.log()
    assert (second.outcome, second.steps()[-1]) == ("finished", 12)
    assert (second.steps()[0] > 1) == resumes, second.log()
    assert ("training begins anew" in second.log()) != resumes
