"""Names for extensions: adapters of MoE layers, optimizers, storage backends, and strategies of one's own.

The packages that define them are internal. Contract tests for extensions are in `lightning_moe_ckpt.testing`.
"""

from lightning_moe_ckpt.operators import AttributeCapacity as AttributeCapacity
from lightning_moe_ckpt.operators import AttributeState as AttributeState
from lightning_moe_ckpt.operators import AttributeTap as AttributeTap
from lightning_moe_ckpt.operators import BiasView as BiasView
from lightning_moe_ckpt.operators import CapacityTap as CapacityTap
from lightning_moe_ckpt.operators import ExpertCapacity as ExpertCapacity
from lightning_moe_ckpt.operators import IndexTap as IndexTap
from lightning_moe_ckpt.operators import MaskTap as MaskTap
from lightning_moe_ckpt.operators import MoELayerSpec as MoELayerSpec
from lightning_moe_ckpt.operators import ParameterIndex as ParameterIndex
from lightning_moe_ckpt.operators import ParamSlice as ParamSlice
from lightning_moe_ckpt.operators import ProbabilityTap as ProbabilityTap
from lightning_moe_ckpt.operators import RowsTap as RowsTap
from lightning_moe_ckpt.operators import merged_slices as merged_slices
from lightning_moe_ckpt.operators import register_adapter as register_adapter
from lightning_moe_ckpt.operators import register_optimizer as register_optimizer
from lightning_moe_ckpt.operators import stacked_slices as stacked_slices
from lightning_moe_ckpt.operators import whole_slice as whole_slice
from lightning_moe_ckpt.parallel import OrderedHookState as OrderedHookState
from lightning_moe_ckpt.parallel import ordered_hook as ordered_hook
from lightning_moe_ckpt.storage import Backend as Backend
from lightning_moe_ckpt.storage import Entry as Entry
