"""Lightning callbacks: one per checkpoint policy, and a monitor."""

from lightning_moe_ckpt.callbacks._auto import auto as auto
from lightning_moe_ckpt.callbacks._capacity_boost import CapacityBoost as CapacityBoost
from lightning_moe_ckpt.callbacks._exact_checkpoints import DenseCheckpoint as DenseCheckpoint
from lightning_moe_ckpt.callbacks._exact_checkpoints import DifferentialCheckpoint as DifferentialCheckpoint
from lightning_moe_ckpt.callbacks._exact_checkpoints import SparseCheckpoint as SparseCheckpoint
from lightning_moe_ckpt.callbacks._experts import PartialExpertCheckpoint as PartialExpertCheckpoint
from lightning_moe_ckpt.callbacks._experts import SelectiveExpertCheckpoint as SelectiveExpertCheckpoint
from lightning_moe_ckpt.callbacks._monitor import ExpertLoadMonitor as ExpertLoadMonitor
from lightning_moe_ckpt.callbacks._shared_arguments import CheckpointArguments as CheckpointArguments
from lightning_moe_ckpt.policies import Popularity as Popularity
from lightning_moe_ckpt.storage import Retention as Retention
from lightning_moe_ckpt.tiers import FailureDomain as FailureDomain
