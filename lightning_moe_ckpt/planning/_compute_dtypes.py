"""In which precision are parameters consumed? Watched in the first steps, and agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.operators import ComputeDtypeProbe


class Probe:
    """Runs the precision probe around forward and backward of the first iterations."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._probe = ComputeDtypeProbe(module, dtype)
        self._entered = False

    def enter(self, wanted: bool) -> None:
        if wanted and not self._entered:
            self._probe.__enter__()
            self._entered = True

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._probe.__exit__(None, None, None)

    def verdict(self) -> set[str]:
        """Parameters that may be stored in the low precision."""
        return {fqn for fqn, dtype in self._probe.verdict().items() if dtype == self.dtype}

    def agreed(self, names: Sequence[str], exchange: Exchange) -> dict[str, torch.dtype]:
        """The low precision, for those of the named parameters that every rank may store in it. Collective."""
        verdict = self.verdict()
        rows = exchange.gather([int(name in verdict) for name in names])
        return {name: self.dtype for i, name in enumerate(names) if all(row[i] for row in rows)}
