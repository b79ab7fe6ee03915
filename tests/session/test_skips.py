"""What a slow tier passes over is counted, and said where it is more than noise."""

from __future__ import annotations

import logging

import pytest

from lightning_moe_ckpt.session._skips import Skips
from lightning_moe_ckpt.storage import GenerationId


def follow(story: str) -> Skips:
    """Generations in a row, each `t`aken or `s`kipped."""
    skips = Skips("storage")
    for step, what in enumerate(story):
        if what == "t":
            skips.taken()
        else:
            skips.skipped(GenerationId(step=step, epoch=1))
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
    assert "generations from step 1 (epoch 1) on are skipped" in begins
    last = story.rindex("s")
    assert f"{total} generations were skipped, from step 1 (epoch 1) to step {last} (epoch 1)" in ends
    calm = len(story) - 1 - last
    assert f"and {last - total + (calm if calm < 8 else 0)} taken meanwhile" in ends
