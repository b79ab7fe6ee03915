"""Data sets that a restart can enter in mid-epoch.

`SeededItems` makes random augmentation depend on seed, epoch and index only.
"""

from lightning_moe_ckpt.data._seeded_items import SeededItems as SeededItems
