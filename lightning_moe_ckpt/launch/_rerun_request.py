"""Say in the environment that a training is to run some steps of a stored run again: `moe-ckpt replay`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RERUN = "MOE_CKPT_RERUN"
"""Environment variable with a `RerunRequest`. Processes that have it write nothing to any URL."""


@dataclass(frozen=True, kw_only=True)
class RerunRequest:
    """Steps of a stored run to run again. In step N `trainer.global_step` is N."""

    tag: str
    """Tag, as of shared memory, of the only run that may be resumed."""
    name: str
    """Name of this replay, 32 hexadecimal digits: it replaces the tag."""
    results: str
    """File for the losses, written by rank 0."""
    step: int
    """First step that is looked at; the newest generation at or before it is restored."""
    until: int
    """Last step; all processes end with it."""
    hook: str = ""
    """Function called at each step that is looked at, as `module:function`; empty for none."""
    dump: tuple[str, ...] = ()
    """Parts of each step to store: `gradients`, `activations`, `batch`."""
    out: str = ""
    """Folder for them."""
    store: str = ""
    """Folder for a run with the states of boundaries as its generations; empty for none."""
    store_from: int = 0
    """First of these boundaries."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values for the optimizer's groups, or the trainer's clipping, from `step` on."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable for the processes to start."""
        return {RERUN: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> RerunRequest | None:
        """Return this process's request; `None` where it trains as ever."""
        text = os.environ.get(RERUN)
        return cls(**{**(found := json.loads(text)), "dump": tuple(found["dump"])}) if text else None
