"""Everything that decides which batches are trained, when validation runs, and what is averaged, killed and resumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns
from campaign._training import Checkpointing
from campaign._variants import Variant
from lightning_moe_ckpt.testing import Kill, Seam

SPARSE = Checkpointing(policy="sparse", window=3)
DENSE = Checkpointing(policy="dense", every_n_steps=2)


def variant(*trainer: tuple[str, Any], **options: Any) -> Variant:
    return Variant(trainer=trainer, **options)


LOOPS: dict[str, Variant] = {
    "overfit": variant(("overfit_batches", 2), epochs=5, validate_every=1),
    "limit_train_int": variant(("limit_train_batches", 4), epochs=3),
    "limit_train_float": variant(("limit_train_batches", 0.6), epochs=4, validate_every=3),
    "limit_train_stream": variant(("limit_train_batches", 4), epochs=3, source="stream", validate_every=2, batches=8),
    "limit_beyond_stream": variant(("limit_train_batches", 7), epochs=3, source="stream", batches=5),
    "validate_over_epochs": variant(
        ("val_check_interval", 3), ("check_val_every_n_epoch", None), ("num_sanity_val_steps", 2)
    ),
    "validate_fraction": variant(("val_check_interval", 0.4)),
    "limit_validation": variant(("limit_val_batches", 1)),
    "reload": variant(("reload_dataloaders_every_n_epochs", 1), epochs=3, batches=4),
    "reload_workers": variant(("reload_dataloaders_every_n_epochs", 1), epochs=3, batches=4, workers=2),
    "reload_rarely": variant(
        ("reload_dataloaders_every_n_epochs", 2), epochs=4, batches=3, validate_every=3, source="by_epoch"
    ),
    "combined": variant(source="combined"),
    "combined_workers": variant(source="combined", workers=1),
    "ragged": variant(accumulate=3, epochs=4),
    "growing": variant(growing_accumulation=True, epochs=3),
    "plateau_step": variant(plateau=("step", 2), validate_every=1),
    "plateau_epoch": variant(plateau=("epoch", 2), epochs=4, batches=3, validate_every=3),
    "stream": variant(source="stream"),
    "stream_workers": variant(source="stream", workers=2),
    "stream_ranks": variant(source="stream", workers=1, world_size=3),
    "endless": variant(("max_steps", 10), ("max_epochs", -1), ("check_val_every_n_epoch", None), source="endless"),
    "max_steps": variant(("max_steps", 8)),
}


KILLS = [
    [Kill(phase="after_batch_end", step=5, settle=10.0)],
    [Kill(phase="forward", step=5), Kill(phase="batch_end", step=7, settle=10.0)],
]
"""At what ends an epoch of most runs, in the next one, and twice."""

MORE_KILLS = [[Kill(phase="after_batch_end", step=step, settle=10.0)] for step in (4, 6, 7)]


QUICK = ("growing", "stream_ranks", "endless", "limit_beyond_stream")
"""What is not drawn in `test_configurations.py`; only `make soak` has the others here."""


@pytest.mark.parametrize("name", QUICK)
def test_killed_in_any_loop_the_run_ends_the_same(campaigns: Campaigns, name: str) -> None:
    """Batches, validations, schedulers and epochs go on as if nothing had happened."""
    campaigns.check_all(replace(LOOPS[name], checkpointing=SPARSE), KILLS[:1])


@pytest.mark.soak
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("checkpointing", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_killed_anywhere_in_any_loop_the_run_ends_the_same(
    campaigns: Campaigns, name: str, checkpointing: Checkpointing
) -> None:
    """Under either callback, and at more places."""
    campaigns.check_all(replace(LOOPS[name], checkpointing=checkpointing), [*KILLS, *MORE_KILLS])


@pytest.mark.parametrize(
    ("world_size", "checkpointing", "kills"),
    [
        pytest.param(1, DENSE, KILLS, marks=pytest.mark.soak),
        (1, SPARSE, KILLS[1:]),
        pytest.param(3, SPARSE, KILLS[:1], marks=pytest.mark.soak),
    ],
)
def test_what_is_logged_over_an_epoch_is_that_of_the_whole_epoch(
    campaigns: Campaigns, checkpointing: Checkpointing, world_size: int, kills: list[list[Kill]]
) -> None:
    """Plain values by mean, sum, maximum and minimum, and metric objects, also those logged before the kill only."""
    campaigns.check_all(Variant(logged=True, world_size=world_size, checkpointing=checkpointing), kills)


def _nothing(*args: Any) -> None:
    """Restores nothing."""


ABLATIONS = {
    "epoch_metrics": (
        Variant(logged=True),
        Seam(module="lightning_moe_ckpt.fit.loggers._metrics", attribute="_rebuild", replacement=_nothing),
        "first",
    ),
    "epoch_of_the_loaders": (
        LOOPS["reload_rarely"],
        Seam(module="lightning_moe_ckpt.fit._data", attribute="DataRecord._load_as_begun", replacement=_nothing),
        "data",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", ABLATIONS)
def test_without_the_mechanism_the_run_is_not_the_same(campaigns: Campaigns, name: str) -> None:
    """The tests above can fail: with other differences, or where the restart finds other data and ends."""
    setup, seam, word = ABLATIONS[name]
    kills = [[Kill(phase="after_batch_end", step=6, settle=10.0)]]
    with pytest.raises(
        AssertionError, match=rf"differences from the fault-free run(.|\n)*{word}|ended with exit codes"
    ) as raised:
        campaigns.check_all(replace(setup, checkpointing=DENSE), kills, seams=[seam])
    assert "has no attribute" not in str(raised.value), "there is no such mechanism"
