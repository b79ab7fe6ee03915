"""How sizes and times are written, and which spellings are read."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from door import size_text

from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt._units import read_duration, read_size, time_text
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 MiB"),
        (1, "<0.01 MiB"),
        (2**20, "1.00 MiB"),
        (1023 * 2**20, "1023.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_bytes_have_one_unit(nbytes: int, text: str) -> None:
    """MiB, and GiB from there on."""
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"), (3, "3 s"), (0.25, "0.2 s"), (59.6, "1 min"), (42, "42 s"), (200, "3 min 20 s"), (3600, "1 h"),
        (18420, "5 h 7 min"), (86400 * 3 + 4 * 3600 + 59, "3 d 4 h"),
    ],
)  # fmt: skip
def test_times_have_the_two_largest_units(seconds: float, text: str) -> None:
    """Whatever is left is cut."""
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    "given",
    [90, 90.0, "90", "90s", "1.5 min", "1.5minutes", "0:01:30", "1:30:00", "0.025h", timedelta(seconds=90), "90000 ms"],
)
def test_a_time_may_be_written_in_any_usual_way(given: Any) -> None:
    """A number is seconds; two parts with a colon are hours and minutes, as `str(timedelta)` has it."""
    hours = isinstance(given, str) and given.startswith("1:30")
    assert read_duration(given) == (timedelta(hours=1, minutes=30) if hours else timedelta(seconds=90))


@pytest.mark.parametrize("wrong", ["soon", "-3", -3, "3 parsecs", True, None, "", float("inf"), float("nan"), "1e99 d"])
def test_what_is_no_time_is_refused(wrong: Any) -> None:
    """With what it may be, and the call as it was written."""
    with pytest.raises(ValueError, match=r"must be a time of 0 or more"):
        read_duration(wrong)
    with pytest.raises(ConfigurationError, match=r"^`DenseCheckpoint\(stop_grace=.*'25s', '10min'"):
        DenseCheckpoint("/ckpt", stop_grace=wrong)


def test_durations_of_callbacks_and_strategy_are_all_read() -> None:
    """What is kept is a `timedelta`, whatever was given."""
    callback = DenseCheckpoint("/ckpt", stop_grace=25, storage_at_least="5min")
    assert (callback.stop_grace, callback.storage_at_least) == (timedelta(seconds=25), timedelta(minutes=5))
    strategy = MoEStrategy(timeout="10min", bucket_nbytes="4MiB")
    assert (strategy.timeout, strategy.bucket_nbytes) == (timedelta(minutes=10), 4 * 2**20)


def test_text_of_a_timedelta_reads_back() -> None:
    """LightningCLI writes it into the configuration that it prints."""
    for each in (
        timedelta(days=2, hours=3, seconds=4),
        timedelta(seconds=25),
        timedelta(days=1),
        timedelta(seconds=1.5),
    ):
        assert read_duration(str(each)) == each


def test_sizes_have_a_unit_or_none() -> None:
    """Decimal and binary."""
    assert [read_size(each) for each in (7, "7", "400MB", "1.5 GiB")] == [7, 7, 400 * 10**6, 3 * 2**29]
