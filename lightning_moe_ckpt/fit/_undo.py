"""Put back what an attempt at a step has changed, so that the step can be done again in the same process.

Weights are too many to be held. An attempt ends before the optimizer steps, so nothing changes them, but for passes that do so
themselves, as those of `nn.Embedding(max_norm=...)`. That is noticed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_moe_ckpt import _lightning_attempts
from lightning_moe_ckpt._lightning_kinds import restore_values
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.fit._memento import Memento
from lightning_moe_ckpt.fit._run import FitSession
from lightning_moe_ckpt.snapshot import DataAccess, versions

MOST_ITEMS = 1000
"""Most items of a user's container that are looked into in every step."""


class StepUndo:
    """What a step may change, as it begins.

    Args:
        trainer, module: which take it.
        run: of this process.
        batch: what it trains on.
        accesses: counts what uses `.data` of the module's parameters.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, run: FitSession, batch: Any, accesses: DataAccess
    ) -> None:
        users = _hold_users(module)
        held = Memento([batch, *run.generators()], apart=_lightning_attempts.APART, most_nbytes=sys.maxsize)
        self._put_back = [
            *(run.hold_attempt(), _lightning_attempts.hold(trainer, module), _hold_buffers(module)),
            *(held.restore, users.restore),
        ]
        self.misses = users.misses
        """Whether the module has containers that are not looked into."""
        self._accesses, self._count = accesses, accesses.count
        self._names, self._weights = zip(*module.named_parameters(), strict=True)
        self._versions = versions(self._weights)

    def edits(self) -> str:
        """Return what has changed weights since, or may have; empty if nothing has."""
        if self._accesses.count != self._count:
            return "a step uses `.data` of weights"
        now = versions(self._weights)
        changed = [name for name, *two in zip(self._names, self._versions, now, strict=True) if two[0] != two[1]]
        return f"a step changes `{changed[0]}` before the optimizer does" if changed else ""

    def undo(self) -> None:
        """Make everything what it was as the step began; as often as it has to be.

        Raises:
            CheckpointError: weights have changed.
        """
        if edits := self.edits():
            raise CheckpointError(
                f"A step that has begun cannot be done again here: {edits}. When this process ends, another one takes its place."
            )
        for put_back in self._put_back:
            put_back()


def _hold_buffers(module: LightningModule) -> Callable[[], None]:
    """Return what puts back which buffers there are, for a step may replace them, and their values."""
    found = [each._buffers for each in _lightning_attempts.modules_of(module) if each._buffers]  # noqa: SLF001
    spaces = [(space, dict(space)) for space in found]
    held = [(buffer, buffer.clone()) for space in found for buffer in space.values() if buffer is not None]

    def put_back() -> None:
        for space, items in spaces:
            space.clear()
            space.update(items)
        for buffer, kept in held:
            restore_values(buffer, kept)

    return put_back


def _hold_users(module: LightningModule) -> Memento:
    """Return what puts back random state, and what the user's attributes hold.

    What only a step needs, such as a list of losses that a hook behind it empties, is in no journal.
    """
    parts, values = _lightning_attempts.parts_of(module)
    return Memento(values, shallow=parts, apart=_lightning_attempts.APART, most_items=MOST_ITEMS)
