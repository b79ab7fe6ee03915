"""Copies that overlap with training."""

from lightning_moe_ckpt.native._bandwidth import measure_bandwidth as measure_bandwidth
from lightning_moe_ckpt.native._copies import Copy as Copy
from lightning_moe_ckpt.native._copies import CopyList as CopyList
from lightning_moe_ckpt.native._copies import copy_now as copy_now
from lightning_moe_ckpt.native._cpu import CpuCopyEngine as CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CudaCopyEngine as CudaCopyEngine
from lightning_moe_ckpt.native._engine import CopyEngine as CopyEngine
from lightning_moe_ckpt.native._engine import Ticket as Ticket
from lightning_moe_ckpt.native._engine import create_engine as create_engine
