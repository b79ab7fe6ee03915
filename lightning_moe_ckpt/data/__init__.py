"""Data sets that restarts can go into the middle of.

`SeededItems` lets random augmentation depend on epoch and index alone.
"""

from lightning_moe_ckpt.data._seeded_items import SeededItems as SeededItems
