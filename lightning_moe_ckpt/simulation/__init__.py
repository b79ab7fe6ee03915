"""Simulate a run under failures, and compute what is expected of it.

Internal: may change in any version.
"""

from lightning_moe_ckpt.simulation._profile import ClusterProfile as ClusterProfile
from lightning_moe_ckpt.simulation._profile import CostProfile as CostProfile
from lightning_moe_ckpt.simulation._profile import ModelProfile as ModelProfile
from lightning_moe_ckpt.simulation._profile import Profile as Profile
from lightning_moe_ckpt.simulation._profile import SpeedProfile as SpeedProfile
from lightning_moe_ckpt.simulation._profile import TrainingProfile as TrainingProfile
