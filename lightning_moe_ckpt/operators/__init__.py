"""Find operators and slice parameters and optimizer state."""

from lightning_moe_ckpt.operators._counts import LoadCounter as LoadCounter
from lightning_moe_ckpt.operators._counts import Measure as Measure
from lightning_moe_ckpt.operators._discover import discover as discover
from lightning_moe_ckpt.operators._layers import MoELayerSpec as MoELayerSpec
from lightning_moe_ckpt.operators._layers import stacked_slices as stacked_slices
from lightning_moe_ckpt.operators._layers import whole_slice as whole_slice
from lightning_moe_ckpt.operators._optimizer import StateSchema as StateSchema
from lightning_moe_ckpt.operators._optimizer_layouts import StateEntry as StateEntry
from lightning_moe_ckpt.operators._optimizer_layouts import register_optimizer as register_optimizer
from lightning_moe_ckpt.operators._param_groups import groups_state as groups_state
from lightning_moe_ckpt.operators._param_groups import load_groups_state as load_groups_state
from lightning_moe_ckpt.operators._parameters import ParameterIndex as ParameterIndex
from lightning_moe_ckpt.operators._popularity_taps import CapacityTap as CapacityTap
from lightning_moe_ckpt.operators._popularity_taps import ProbabilityTap as ProbabilityTap
from lightning_moe_ckpt.operators._probe import ComputeDtypeProbe as ComputeDtypeProbe
from lightning_moe_ckpt.operators._set import OperatorSet as OperatorSet
from lightning_moe_ckpt.operators._split import split as split
from lightning_moe_ckpt.operators._taps import AttributeTap as AttributeTap
from lightning_moe_ckpt.operators._taps import CountTap as CountTap
from lightning_moe_ckpt.operators._taps import IndexTap as IndexTap
from lightning_moe_ckpt.operators._taps import RowsTap as RowsTap
from lightning_moe_ckpt.operators._types import Operator as Operator
from lightning_moe_ckpt.operators._types import ParamSlice as ParamSlice
from lightning_moe_ckpt.operators._types import RecordKind as RecordKind
from lightning_moe_ckpt.operators.adapters import register_adapter as register_adapter
from lightning_moe_ckpt.operators.adapters import unregister_adapter as unregister_adapter
