"""Bytes of operators: measured once for a plan's precisions, and cut if a policy wants smaller pieces."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import PlanInputs, Policy
from lightning_moe_ckpt.snapshot import StateView, dense_nbytes, record_nbytes, split_operators

Dtypes = dict[str, torch.dtype]
"""Compute precisions by parameter, where they differ from its own."""


class OperatorSizes:
    """Bytes that this rank writes of the view's operators."""

    def __init__(self, view: StateView, groups: ParallelGroups) -> None:
        self._view, self._groups = view, groups
        self._whole: tuple[Dtypes, dict[str, tuple[int, int]]] | None = None
        self._dense: int | None = None

    def forget(self) -> None:
        """Let the next reading measure anew: the view's operators or the optimizer's state have changed."""
        self._whole = self._dense = None

    @property
    def dense_nbytes(self) -> int:
        """Bytes of a full snapshot, without alignment and journal."""
        if self._dense is None:
            self._dense = dense_nbytes(self._view, self._groups)
        return self._dense

    def inputs(self, policy: Policy, inputs: PlanInputs, dtypes: Dtypes) -> tuple[PlanInputs, int]:
        """Return the inputs with sizes, and the policy's limit in bytes for pieces of operators; 0 for no limit."""
        if self._whole is None or self._whole[0] != dtypes:
            self._whole = dtypes, record_nbytes(self._view.replanned(self._view.operators, dtypes), self._groups)
        inputs = replace(inputs, sizes=self._whole[1])
        limit = policy.split_nbytes(inputs)
        if not limit:
            return inputs, limit
        whole = self._view.replanned(self._view.operators, dtypes)
        view = whole.replanned(split_operators(whole, self._groups, limit), dtypes)
        return replace(inputs, operators=view.operators, sizes=record_nbytes(view, self._groups)), limit
