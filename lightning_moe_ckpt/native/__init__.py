"""Copies that overlap with training, compression of gradients, and replay of optimizer steps.

Internal: may change in any version.
"""

from lightning_moe_ckpt.native._adam import LANES as LANES
from lightning_moe_ckpt.native._adam import AdamState as AdamState
from lightning_moe_ckpt.native._adam import AdamStep as AdamStep
from lightning_moe_ckpt.native._adam import repeats as repeats
from lightning_moe_ckpt.native._bubbles import BubbleFigures as BubbleFigures
from lightning_moe_ckpt.native._bubbles import Bubbles as Bubbles
from lightning_moe_ckpt.native._choice import compress_gradients as compress_gradients
from lightning_moe_ckpt.native._choice import create_engine as create_engine
from lightning_moe_ckpt.native._choice import measure_bandwidth as measure_bandwidth
from lightning_moe_ckpt.native._choice import replay_adam as replay_adam
from lightning_moe_ckpt.native._doctor import Examined as Examined
from lightning_moe_ckpt.native._doctor import examine as examine
from lightning_moe_ckpt.native._engine import Column as Column
from lightning_moe_ckpt.native._engine import Copy as Copy
from lightning_moe_ckpt.native._engine import CopyEngine as CopyEngine
from lightning_moe_ckpt.native._engine import CopyTable as CopyTable
from lightning_moe_ckpt.native._engine import PipelinePhase as PipelinePhase
from lightning_moe_ckpt.native._engine import PreparedTable as PreparedTable
from lightning_moe_ckpt.native._engine import Ticket as Ticket
from lightning_moe_ckpt.native._engine import copy_through as copy_through
from lightning_moe_ckpt.native._gradient import MAX_PART_NUMEL as MAX_PART_NUMEL
from lightning_moe_ckpt.native._gradient import CompressedGradient as CompressedGradient
from lightning_moe_ckpt.native._gradient import decompress_gradient as decompress_gradient
from lightning_moe_ckpt.native._gradient import pack_gradient as pack_gradient
from lightning_moe_ckpt.native._gradient import packed_nbytes as packed_nbytes
from lightning_moe_ckpt.native._gradient import unpack_gradient as unpack_gradient
from lightning_moe_ckpt.native._host_memory import Preparation as Preparation
from lightning_moe_ckpt.native._host_memory import Ranges as Ranges
from lightning_moe_ckpt.native._host_memory import Spelled as Spelled
from lightning_moe_ckpt.native._host_memory import append as append
from lightning_moe_ckpt.native._host_memory import host_buffer as host_buffer
from lightning_moe_ckpt.native._host_memory import map_file as map_file
from lightning_moe_ckpt.native._host_memory import read_records as read_records
from lightning_moe_ckpt.native._host_memory import spell_rows as spell_rows
from lightning_moe_ckpt.native._host_memory import take_huge_pages as take_huge_pages
from lightning_moe_ckpt.native._library import explain as explain
