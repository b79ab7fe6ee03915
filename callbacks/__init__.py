"""Lightning callbacks, one per checkpoint policy."""

from lightning_moe_ckpt.callbacks._dense import DenseCheckpoint as DenseCheckpoint
from lightning_moe_ckpt.callbacks._sparse import SparseCheckpoint as SparseCheckpoint
