"""One adapter per way of storing experts; each turns a module into a `MoELayerSpec` or declines."""

from __future__ import annotations

from lightning_moe_ckpt.operators.adapters._class_rules import find_class_rule as find_class_rule
from lightning_moe_ckpt.operators.adapters._module_list import describe_module_list as describe_module_list
from lightning_moe_ckpt.operators.adapters._own import describe_own as describe_own
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory as AdapterFactory
from lightning_moe_ckpt.operators.adapters._registry import find_adapter as find_adapter
from lightning_moe_ckpt.operators.adapters._registry import register_adapter as register_adapter
from lightning_moe_ckpt.operators.adapters._registry import unregister_adapter as unregister_adapter
from lightning_moe_ckpt.operators.adapters._stacked import describe_stacked as describe_stacked
