"""Find operators and slice parameters and optimizer state."""

from lightning_moe_ckpt.operators._types import Operator as Operator
from lightning_moe_ckpt.operators._types import ParamSlice as ParamSlice
from lightning_moe_ckpt.operators._types import RecordKind as RecordKind
