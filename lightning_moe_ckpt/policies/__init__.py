"""Pure decisions: the record of each operator to take, at each step, for each tier.

Internal: may change in any version.
"""

from lightning_moe_ckpt.policies._exact import DensePolicy as DensePolicy
from lightning_moe_ckpt.policies._exact import DifferentialPolicy as DifferentialPolicy
from lightning_moe_ckpt.policies._exact import SparsePolicy as SparsePolicy
from lightning_moe_ckpt.policies._expert_tables import MEMORY as MEMORY
from lightning_moe_ckpt.policies._expert_tables import PEER as PEER
from lightning_moe_ckpt.policies._expert_tables import STORAGE as STORAGE
from lightning_moe_ckpt.policies._expert_tables import ExpertLayout as ExpertLayout
from lightning_moe_ckpt.policies._expert_tables import Experts as Experts
from lightning_moe_ckpt.policies._expert_tables import Selection as Selection
from lightning_moe_ckpt.policies._expert_tables import expert_layouts as expert_layouts
from lightning_moe_ckpt.policies._expert_tables import expert_names as expert_names
from lightning_moe_ckpt.policies._partial import DynamicK as DynamicK
from lightning_moe_ckpt.policies._partial import PartialPolicy as PartialPolicy
from lightning_moe_ckpt.policies._plan import AUDIENCES as AUDIENCES
from lightning_moe_ckpt.policies._plan import Audience as Audience
from lightning_moe_ckpt.policies._plan import Plan as Plan
from lightning_moe_ckpt.policies._plan import WindowStep as WindowStep
from lightning_moe_ckpt.policies._policy import Budget as Budget
from lightning_moe_ckpt.policies._policy import Chains as Chains
from lightning_moe_ckpt.policies._policy import Deltas as Deltas
from lightning_moe_ckpt.policies._policy import DifferentialMode as DifferentialMode
from lightning_moe_ckpt.policies._policy import PlanInputs as PlanInputs
from lightning_moe_ckpt.policies._policy import Policy as Policy
from lightning_moe_ckpt.policies._popularity import Popularity as Popularity
from lightning_moe_ckpt.policies._popularity import decayed_popularity as decayed_popularity
from lightning_moe_ckpt.policies._popularity import popularity_per_capacity as popularity_per_capacity
from lightning_moe_ckpt.policies._popularity import should_reorder as should_reorder
from lightning_moe_ckpt.policies._selective import SelectivePolicy as SelectivePolicy
from lightning_moe_ckpt.policies._token_ledger import NEVER as NEVER
from lightning_moe_ckpt.policies._token_ledger import TierLedger as TierLedger
from lightning_moe_ckpt.policies._token_ledger import TokenLedger as TokenLedger
from lightning_moe_ckpt.policies._windows import all_names as all_names
from lightning_moe_ckpt.policies._windows import plan_window as plan_window
from lightning_moe_ckpt.policies._writers import Shard as Shard
from lightning_moe_ckpt.policies._writers import assign_adaptively as assign_adaptively
from lightning_moe_ckpt.policies._writers import assign_writers as assign_writers
from lightning_moe_ckpt.policies._writers import box_text as box_text
from lightning_moe_ckpt.policies._writers import cut_among as cut_among
from lightning_moe_ckpt.policies._writers import writers_of as writers_of
