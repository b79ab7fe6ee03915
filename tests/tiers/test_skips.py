"""What a slow tier passes over, and windows without a generation, are counted, and said where they are more than noise."""

from __future__ import annotations

import logging

import pytest

from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import MissedWindows, SkipCounter


def follow(story: str) -> SkipCounter:
    """Generations in a row, each `t`aken or `s`kipped."""
    skips = SkipCounter("storage")
    for step, what in enumerate(story):
        if what == "t":
            skips.taken()
        else:
            skips.skipped(GenerationId(step=step, incarnation=1, nonce="0123456789ab"))
    skips.close()
    return skips


def test_one_now_and_then_is_counted_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert follow("tts" + "t" * 8 + "stttttttt" + "s").total == 3
    assert not caplog.records


@pytest.mark.parametrize("story", ["tsss" + "t" * 8, "tssst" + "t" * 12, "tststststtttttts" + "t" * 9, "tss", "tssttt"])
def test_a_stretch_is_said_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture, story: str) -> None:
    """Also where every second one is taken, and where the run ends in it."""
    with caplog.at_level(logging.DEBUG):
        total = follow(story).total
    begins, ends = (record.getMessage() for record in caplog.records)
    assert "generations from step 1 (incarnation 1) on are skipped" in begins
    last = story.rindex("s")
    assert f"{total} generations were skipped, from step 1 (incarnation 1) to step {last} (incarnation 1)" in ends
    calm = len(story) - 1 - last
    assert f"and {last - total + (calm if calm < 8 else 0)} taken meanwhile" in ends


def said_of(story: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of windows in a row, each `t`aken or `m`issed."""
    missed_windows = MissedWindows()
    with caplog.at_level(logging.DEBUG):
        for step, what in enumerate(story):
            missed_windows.taken(step) if what == "t" else missed_windows.add(step, f"because {step}.")
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_a_window_or_two_without_a_generation_are_noise(caplog: pytest.LogCaptureFixture) -> None:
    assert said_of("mmtmtmmtmm", caplog) == []


@pytest.mark.parametrize(("story", "since"), [("tmmm", "since that of step 0"), ("mmmmmm", "since the start")])
def test_windows_in_a_row_without_a_generation_are_an_error_once(
    caplog: pytest.LogCaptureFixture, story: str, since: str
) -> None:
    """With the cause, and with what a failure would cost."""
    (said,) = said_of(story, caplog)
    third = story.index("mmm") + 2
    assert said.startswith(f"ERROR 3 windows in a row up to step {third} gave no checkpoint, and there is none")
    assert f"{since}: because {third}." in said


def test_the_end_of_such_a_row_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """With its length; the next row is another story."""
    said = said_of("tmmmmtttmmmt", caplog)
    assert [line.split()[0] for line in said] == ["ERROR", "WARNING"] * 2
    assert "4 windows in a row gave none" in said[1]
    assert "since that of step 7" in said[2]
