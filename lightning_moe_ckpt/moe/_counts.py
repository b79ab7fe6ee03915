"""Count tokens per expert exactly once per step, on the device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as activation checkpointing does to recompute.

    `torch.is_grad_enabled()` cannot tell: checkpointing without re-entrance records gradients both times.
    """
    current = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001  # no public way to ask
    return current is not None and current() != -1


class TokenCounter:
    """Running counts of this rank's slots per global expert: `processed` by the expert, or `dropped` over capacity.

    Plain tensors, not buffers: a module's buffers are broadcast from rank 0 by DistributedDataParallel, and counts
    differ between ranks.
    """

    def __init__(self, num_experts: int) -> None:
        self.processed = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        self.dropped = torch.zeros(num_experts, dtype=torch.int64, device="cpu")

    def add(self, kept_E: Tensor, routed_E: Tensor) -> None:
        """Add the counts of one forward; the first call moves the counters to their device."""
        if self.processed.device != kept_E.device:
            self.processed, self.dropped = self.processed.to(kept_E.device), self.dropped.to(kept_E.device)
        self.processed += kept_E
        self.dropped += routed_E - kept_E

    @staticmethod
    def take(count_E: Tensor) -> Tensor:
        """Return a copy of a count and reset it to zero."""
        taken = count_E.clone()
        count_E.zero_()
        return taken
