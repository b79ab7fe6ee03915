"""However a fit with copies on another node ends, its processes keep no thread and no descriptor of it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from campaign._belongings import looks, train_and_look
from campaign._campaign import Campaigns
from campaign._nodes import Nodes
from campaign._stops import UserError
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import Attempt, Kill

SETUP = Setup(
    model="stacked",
    world_size=2,
    batches=4,
    validate_every=None,
    checkpointing=Checkpointing(policy="sparse", window=2),
)
BOOM = signal.SIGUSR2
"""Makes the user's code raise."""


def fit_on_nodes(nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    """On a node of its own, and looks around; a fit that the user's code ends is tried again in the same process."""
    nodes.settle(life)
    signal.signal(BOOM, _raise)
    with contextlib.suppress(UserError):
        return train_and_look(SETUP, life)
    return train_and_look(SETUP, replace(life, kill=None))


def _raise(*_: object) -> None:
    raise UserError("a mistake in the model")


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(Kill(phase="forward", step=5, signal=BOOM, everyone=True), id="exception"),
        pytest.param(Kill(phase="forward", step=5, signal=signal.SIGTERM, everyone=True), id="sigterm"),
        pytest.param(Kill(phase="forward", step=5, rank=1, settle=10.0), id="sigkill", marks=pytest.mark.soak),
    ],
)
def test_no_end_leaves_a_thread_or_a_descriptor(campaigns: Campaigns, folder: Path, kill: Kill) -> None:
    """Nor does the fit after it, which goes on from there; and that leaves no memory on either node."""
    nodes = Nodes(folder, (0, 1))
    lives = campaigns.check(
        SETUP, kill, fit=partial(fit_on_nodes, nodes), must_strike=kill.signal != BOOM, may_complain=True
    )
    for rank in range(2):
        assert any("is replicated to ranks" in life.log(rank) for life in lives), "there were copies"
        ended = [left for life in lives if life.outcome != "killed" for left in looks(life, rank)]
        assert len(ended) == (1 if kill.signal == signal.SIGKILL else 2)
        assert ended == [[]] * len(ended), lives[-1].log(rank)
    assert nodes.files() == []
