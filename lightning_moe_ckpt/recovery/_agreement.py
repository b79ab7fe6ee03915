"""Which version all ranks resume from: the newest that every rank's part of can be rebuilt from some copy.

It is the newest element of the intersection of what each rank can rebuild. The smallest of the newest that each has
would not do: it may be one that another rank lacks. Two lives can hold the same step with different bits, so versions
carry epoch and plan, and the timeline rule of the run's log holds for copies in memory too.

Of a lossy generation, ranks may rebuild different versions: what memory has of it is more than what storage has, but
the dense part is in both.

Source: the design, Sec. 6; TierCheck (2025), Fig. 5.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lightning_moe_ckpt.recovery._inventory import Inventory, Version
from lightning_moe_ckpt.storage import GenerationId


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A generation that every rank can be given its part of, in some version."""

    versions: tuple[Version, ...]
    """Of one generation; one, or the flavours of a lossy one, ascending."""
    family: str
    """Of a lossy generation; empty for any other."""

    def __str__(self) -> str:
        return f"{self.generation}, family {self.family[:8]}" if self.family else str(self.versions[0])

    @property
    def generation(self) -> GenerationId:
        """Which one."""
        return self.versions[0].generation

    @property
    def is_partial(self) -> bool:
        """Whether it holds some experts only."""
        return bool(self.family)


def usable_offers(inventory: Inventory, alive: Collection[Version]) -> list[Offer]:
    """What all ranks can resume from, newest first; of equal generations first one that holds everything.

    Args:
        inventory: of all ranks.
        alive: versions that the run's log allows.
    """
    held = [inventory.versions(owner) for owner in range(inventory.world_size)]
    offers = []
    for (_, family, _), versions in _by_family(inventory, alive).items():
        if all(not each.isdisjoint(versions) for each in held):
            offers.append(Offer(versions=tuple(sorted(versions)), family=family))
    return sorted(offers, key=lambda each: (each.generation, not each.family, each.versions[-1]), reverse=True)


def _by_family(inventory: Inventory, alive: Collection[Version]) -> dict[tuple[GenerationId, str, str], set[Version]]:
    found: dict[tuple[GenerationId, str, str], set[Version]] = {}
    for version in alive:
        family = inventory.families.get(version, "")
        key = (version.generation, family, "" if family else version.plan_hash)
        found.setdefault(key, set()).add(version)
    return found
