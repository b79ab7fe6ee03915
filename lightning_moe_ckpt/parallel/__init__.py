"""Process groups, deterministic gradient reduction and norms. Internal: may change in any version."""

from lightning_moe_ckpt.parallel._collectives import OrderedHookState as OrderedHookState
from lightning_moe_ckpt.parallel._collectives import broadcast_tensors as broadcast_tensors
from lightning_moe_ckpt.parallel._collectives import ordered_hook as ordered_hook
from lightning_moe_ckpt.parallel._expert_parallel import ExpertParallelModule as ExpertParallelModule
from lightning_moe_ckpt.parallel._expert_parallel import expert_parallel_fqns as expert_parallel_fqns
from lightning_moe_ckpt.parallel._expert_parallel import expert_parallel_modules as expert_parallel_modules
from lightning_moe_ckpt.parallel._gloo import GroupAbort as GroupAbort
from lightning_moe_ckpt.parallel._gloo import closed_listeners as closed_listeners
from lightning_moe_ckpt.parallel._groups import MESH_RANKS as MESH_RANKS
from lightning_moe_ckpt.parallel._groups import ParallelGroups as ParallelGroups
from lightning_moe_ckpt.parallel._groups import build_groups as build_groups
from lightning_moe_ckpt.parallel._groups import current_groups as current_groups
from lightning_moe_ckpt.parallel._groups import init_fresh_process_group as init_fresh_process_group
from lightning_moe_ckpt.parallel._groups import restart_is_likely as restart_is_likely
from lightning_moe_ckpt.parallel._groups import set_current_groups as set_current_groups
from lightning_moe_ckpt.parallel._groups import shares_agent_store as shares_agent_store
from lightning_moe_ckpt.parallel._groups import tree as tree
from lightning_moe_ckpt.parallel._norms import global_grad_norm as global_grad_norm
from lightning_moe_ckpt.parallel._norms import pieces as pieces
from lightning_moe_ckpt.parallel._pieces import Gather as Gather
from lightning_moe_ckpt.parallel._pieces import OptimizerShard as OptimizerShard
from lightning_moe_ckpt.parallel._pieces import shard_of as shard_of
from lightning_moe_ckpt.parallel._pieces import stepped_of as stepped_of
from lightning_moe_ckpt.parallel._reducer import GradientReducer as GradientReducer
