"""Process groups, deterministic gradient reduction and norms."""

from lightning_moe_ckpt.parallel._broadcast import broadcast_tensors as broadcast_tensors
from lightning_moe_ckpt.parallel._experts import ExpertParallelModule as ExpertParallelModule
from lightning_moe_ckpt.parallel._experts import expert_parallel_fqns as expert_parallel_fqns
from lightning_moe_ckpt.parallel._experts import expert_parallel_modules as expert_parallel_modules
from lightning_moe_ckpt.parallel._groups import GroupName as GroupName
from lightning_moe_ckpt.parallel._groups import ParallelGroups as ParallelGroups
from lightning_moe_ckpt.parallel._groups import build_groups as build_groups
from lightning_moe_ckpt.parallel._groups import check_ep_size as check_ep_size
from lightning_moe_ckpt.parallel._groups import close_groups as close_groups
from lightning_moe_ckpt.parallel._groups import current_groups as current_groups
from lightning_moe_ckpt.parallel._groups import set_current_groups as set_current_groups
from lightning_moe_ckpt.parallel._hook import OrderedHookState as OrderedHookState
from lightning_moe_ckpt.parallel._hook import ordered_hook as ordered_hook
from lightning_moe_ckpt.parallel._launcher import WorldFailed as WorldFailed
from lightning_moe_ckpt.parallel._launcher import run_world as run_world
from lightning_moe_ckpt.parallel._norms import global_grad_norm as global_grad_norm
from lightning_moe_ckpt.parallel._ordered import ordered_all_reduce as ordered_all_reduce
from lightning_moe_ckpt.parallel._ordered import plain_all_reduce as plain_all_reduce
from lightning_moe_ckpt.parallel._reducer import GradientReducer as GradientReducer
from lightning_moe_ckpt.parallel._reducer import ReductionMode as ReductionMode
