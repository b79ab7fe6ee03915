"""Mixture-of-Experts layer in plain PyTorch, expert parallel under `MoEStrategy`."""

from lightning_moe_ckpt.moe._dispatch import Routing as Routing
from lightning_moe_ckpt.moe._dispatch import balance_loss as balance_loss
from lightning_moe_ckpt.moe._dispatch import route as route
from lightning_moe_ckpt.moe._layer import MoELayer as MoELayer
from lightning_moe_ckpt.moe._spread import spread_experts as spread_experts
