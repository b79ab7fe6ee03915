"""Which version all ranks resume from: the newest that every rank's part of can be rebuilt from some copy.

It is the newest element of the intersection of what each rank can rebuild. The smallest of the newest that each has
would not do: it may be one that another rank lacks. Two lives can hold the same step with different bits, so versions
carry epoch and plan, and the timeline rule of the run's log holds for copies in memory too.

Source: the design, Sec. 6; TierCheck (2025), Fig. 5.
"""

from __future__ import annotations

from collections.abc import Collection

from lightning_moe_ckpt.recovery._inventory import Inventory, Version


def usable_versions(inventory: Inventory, alive: Collection[Version]) -> list[Version]:
    """Versions that every rank can be given its part of, newest first.

    Args:
        inventory: of all ranks.
        alive: versions that the run's log allows.
    """
    everywhere = frozenset.intersection(*(inventory.versions(owner) for owner in range(inventory.world_size)))
    return sorted(everywhere.intersection(alive), reverse=True)
