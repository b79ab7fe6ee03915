"""What a run whose restarts are not exact has lost, in tokens of experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_moe_ckpt.policies import TokenLedger


@dataclass(frozen=True, kw_only=True)
class LossFigures:
    """Tokens of experts in a run whose restarts are not exact, over all ranks and faults."""

    k: int | None
    """Experts per layer that each generation takes to storage now, where the policy counts them."""
    plt: float
    """Portion of lost tokens (PEC, eq. 4)."""
    mlt: float
    """Lost tokens by layer, added up (MOETION, eq. 6)."""
    faults: int
    """Recoveries that lost something."""
    processed: int
    """Tokens that experts processed, each as often as it was routed."""
    lost: int
    """Of them, those whose updates are in no weights any more."""
    unsaved: dict[str, int]
    """Of them, those whose updates only live weights have: what losing everything but `memory` or `storage` would cost."""
    accounting: TokenLedger = field(repr=False, compare=False)
    """What all of these are taken from, by expert."""
    budgets: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes of a generation of this rank in force, `local_budget` and `remote_budget`, where a policy has some."""
    bandwidths: dict[str, float] = field(default_factory=dict, compare=False)
    """Bytes per second of this rank from which these follow, where they are measured."""
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """Experts of each layer that the newest generation takes, to `memory` and to `storage`."""
