"""Copies that overlap with training, compression of gradients, and replay of optimizer steps."""

from lightning_moe_ckpt.native._adam import replay_adam as replay_adam
from lightning_moe_ckpt.native._adam_steps import AdamState as AdamState
from lightning_moe_ckpt.native._adam_steps import AdamStep as AdamStep
from lightning_moe_ckpt.native._bandwidth import measure_bandwidth as measure_bandwidth
from lightning_moe_ckpt.native._compiled import CompiledCpuEngine as CompiledCpuEngine
from lightning_moe_ckpt.native._compiled_cuda import CompiledCudaEngine as CompiledCudaEngine
from lightning_moe_ckpt.native._compress import compress_gradients as compress_gradients
from lightning_moe_ckpt.native._copies import Copy as Copy
from lightning_moe_ckpt.native._copies import CopyList as CopyList
from lightning_moe_ckpt.native._copies import copy_now as copy_now
from lightning_moe_ckpt.native._cpu import CpuCopyEngine as CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CudaCopyEngine as CudaCopyEngine
from lightning_moe_ckpt.native._engine import CopyEngine as CopyEngine
from lightning_moe_ckpt.native._engine import Ticket as Ticket
from lightning_moe_ckpt.native._engine import copy_through as copy_through
from lightning_moe_ckpt.native._engine import create_engine as create_engine
from lightning_moe_ckpt.native._gradient import CompressedGradient as CompressedGradient
from lightning_moe_ckpt.native._gradient import GradientCompression as GradientCompression
from lightning_moe_ckpt.native._gradient import QuantizedGradient as QuantizedGradient
from lightning_moe_ckpt.native._gradient import SparseGradient as SparseGradient
from lightning_moe_ckpt.native._gradient import decompress_gradient as decompress_gradient
from lightning_moe_ckpt.native._library import Library as Library
from lightning_moe_ckpt.native._library import NativeError as NativeError
from lightning_moe_ckpt.native._library import PartStatus as PartStatus
from lightning_moe_ckpt.native._library import explain as explain
