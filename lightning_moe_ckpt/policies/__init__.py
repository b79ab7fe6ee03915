"""Pure decisions: which record to take of which operator, at which step, for which tier."""

from lightning_moe_ckpt.policies._base import Decision as Decision
from lightning_moe_ckpt.policies._base import Plan as Plan
from lightning_moe_ckpt.policies._base import Policy as Policy
from lightning_moe_ckpt.policies._dense import DensePolicy as DensePolicy
from lightning_moe_ckpt.policies._planner import PlanItem as PlanItem
from lightning_moe_ckpt.policies._planner import WindowPlan as WindowPlan
from lightning_moe_ckpt.policies._planner import needs_split as needs_split
from lightning_moe_ckpt.policies._planner import plan_for_window as plan_for_window
from lightning_moe_ckpt.policies._planner import plan_window as plan_window
from lightning_moe_ckpt.policies._planner import split_nbytes as split_nbytes
from lightning_moe_ckpt.policies._popularity import Order as Order
from lightning_moe_ckpt.policies._popularity import Popularity as Popularity
from lightning_moe_ckpt.policies._popularity import decayed_popularity as decayed_popularity
from lightning_moe_ckpt.policies._popularity import order as order
from lightning_moe_ckpt.policies._popularity import popularity_per_capacity as popularity_per_capacity
from lightning_moe_ckpt.policies._popularity import should_reorder as should_reorder
from lightning_moe_ckpt.policies._popularity import soft_popularity as soft_popularity
from lightning_moe_ckpt.policies._positions import assign_positions as assign_positions
from lightning_moe_ckpt.policies._positions import positions as positions
from lightning_moe_ckpt.policies._sparse import SparsePolicy as SparsePolicy
from lightning_moe_ckpt.policies._writers import RecordPiece as RecordPiece
from lightning_moe_ckpt.policies._writers import WrittenPart as WrittenPart
from lightning_moe_ckpt.policies._writers import assign_writers as assign_writers
