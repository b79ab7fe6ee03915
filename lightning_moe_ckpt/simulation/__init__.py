"""Simulate a run under failures, and compute its expected goodput.

Internal: may change in any version.
"""

from lightning_moe_ckpt.simulation._chooser import EVERY_MEMORY as EVERY_MEMORY
from lightning_moe_ckpt.simulation._chooser import PlannedRun as PlannedRun
from lightning_moe_ckpt.simulation._chooser import choose as choose
from lightning_moe_ckpt.simulation._chooser import reasons as reasons
from lightning_moe_ckpt.simulation._events import Simulated as Simulated
from lightning_moe_ckpt.simulation._events import expected as expected
from lightning_moe_ckpt.simulation._events import simulate as simulate
from lightning_moe_ckpt.simulation._profile import ClusterProfile as ClusterProfile
from lightning_moe_ckpt.simulation._profile import CostProfile as CostProfile
from lightning_moe_ckpt.simulation._profile import Failures as Failures
from lightning_moe_ckpt.simulation._profile import ModelProfile as ModelProfile
from lightning_moe_ckpt.simulation._profile import Profile as Profile
from lightning_moe_ckpt.simulation._profile import Scope as Scope
from lightning_moe_ckpt.simulation._profile import SpeedProfile as SpeedProfile
from lightning_moe_ckpt.simulation._profile import TrainingProfile as TrainingProfile
from lightning_moe_ckpt.simulation._systems import SYSTEMS as SYSTEMS
from lightning_moe_ckpt.simulation._systems import CheckFreq as CheckFreq
from lightning_moe_ckpt.simulation._systems import Gemini as Gemini
from lightning_moe_ckpt.simulation._systems import MoC as MoC
from lightning_moe_ckpt.simulation._systems import MoEvement as MoEvement
from lightning_moe_ckpt.simulation._systems import NoCheckpoints as NoCheckpoints
from lightning_moe_ckpt.simulation._systems import Ours as Ours
from lightning_moe_ckpt.simulation._systems import System as System
from lightning_moe_ckpt.simulation._systems import TierCheck as TierCheck
