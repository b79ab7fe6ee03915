"""Adapters turn a module into a `MoELayerSpec` or decline."""

from __future__ import annotations

from lightning_moe_ckpt.operators.adapters._by_class import find_adapter as find_adapter
from lightning_moe_ckpt.operators.adapters._by_class import register_adapter as register_adapter
from lightning_moe_ckpt.operators.adapters._by_class import unregister_adapter as unregister_adapter
from lightning_moe_ckpt.operators.adapters._by_shape import describe_module_list as describe_module_list
from lightning_moe_ckpt.operators.adapters._by_shape import describe_own as describe_own
from lightning_moe_ckpt.operators.adapters._by_shape import describe_stacked as describe_stacked
from lightning_moe_ckpt.operators.adapters._tutel import tutel_slots as tutel_slots
