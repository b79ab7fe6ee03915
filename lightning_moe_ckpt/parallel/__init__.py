"""Process groups, deterministic gradient reduction and norms."""

from lightning_moe_ckpt.parallel._groups import ParallelGroups as ParallelGroups
from lightning_moe_ckpt.parallel._groups import current_groups as current_groups
from lightning_moe_ckpt.parallel._groups import set_current_groups as set_current_groups
