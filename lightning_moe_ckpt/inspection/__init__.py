"""Examine a stored run from outside: list, inspect, verify and export, which write nothing to it, and collect garbage.

This needs neither the model nor Lightning nor the ranks that wrote the run: coordinates in storage are global.

Internal: may change in any version.
"""

from lightning_moe_ckpt.inspection._answers import Screen as Screen
from lightning_moe_ckpt.inspection._export import export as export
from lightning_moe_ckpt.inspection._verify import verify as verify
