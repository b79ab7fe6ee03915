"""One rank of three raises, the others lose it in a collective, the launcher starts again: memory has what they had."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from campaign._campaign import Campaigns
from campaign._stops import UserError
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill

SETUP = Setup(
    model="stacked",
    options=(("num_experts", 6),),
    world_size=3,
    expert_parallel=3,
    batches=6,
    validate_every=None,
    checkpointing=Checkpointing(policy="sparse", window=3),
)
RAISES = 1
"""The rank whose user code is wrong, once."""
BOOM = Kill(phase="forward", step=8, rank=RAISES, signal=signal.SIGUSR2)
NEWEST = 6
"""Windows are boundaries 1 to 3, 4 to 6, and so on; the one from 7 on is cut."""


@dataclass(frozen=True)
class Launcher:
    """Starts the job."""

    restarts_left: bool

    def __call__(self, life: Attempt) -> Mapping[str, Any]:
        """One start; the user's mistake is made once."""
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3" if self.restarts_left else str(life.index)
        signal.signal(signal.SIGUSR2, lambda *_: _raise(Path(urlparse(life.url).path)))
        return train(SETUP, life)


def _raise(run: Path) -> None:
    """Once the coordinator has committed what is to be restored: only then is it known that storage has it."""
    deadline = time.monotonic() + 30
    while not [*run.glob(f"snap/{NEWEST:012}/i000001-*/_COMMITTED")]:
        assert time.monotonic() < deadline, "the generation before is not committed"
        time.sleep(0.01)
    raise UserError("a mistake in the model")


def sources(life: AttemptResult) -> list[str]:
    """Where each rank's bytes came from, as rank 0 says of all."""
    said = re.findall(r"ranks? ([\d, ]+): [\d.]+ MiB from (\S+)", life.log())
    by_rank = {int(rank): source for ranks, source in said for rank in ranks.split(", ")}
    return [by_rank[rank] for rank in range(life.world_size)]


@pytest.mark.parametrize(
    ("restarts_left", "wanted"),
    [
        pytest.param(True, ["host", "host", "host"], id="restarts-left"),
        # Storage has the generation too, and who raises cannot know that it will be started again.
        pytest.param(False, ["host", "storage", "host"], id="no-restarts-left"),
    ],
)
def test_after_an_exception_in_one_rank_the_newest_generation_is_restored_from_memory(
    campaigns: Campaigns, restarts_left: bool, wanted: list[str]
) -> None:
    """The last one that all ranks had completed; the run ends in the same bits as if nobody had raised."""
    launcher = Launcher(restarts_left)
    first, second = campaigns.check(SETUP, BOOM, fit=launcher, may_complain=True)
    assert set(first.exit_codes.values()) == {1}
    assert "UserError" in first.log(RAISES)
    for rank in {0, 1, 2} - {RAISES}:
        assert "UserError" not in first.log(rank), "it failed in a collective"
    assert f"resumes from step {NEWEST} (incarnation 1)" in second.log()
    assert sources(second) == wanted
