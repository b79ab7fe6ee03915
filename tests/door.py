"""What tests of several packages know of the inside: a name that moves there moves in one line here."""

from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.callbacks._base import CheckpointCallback, checkpoint_of
from lightning_moe_ckpt.native._cuda import CompiledCudaTicket, TorchDevice
from lightning_moe_ckpt.native._gradient import compress_with
from lightning_moe_ckpt.native._plan import Arrangement, PlannedCopies, PlannedTable, Space
from lightning_moe_ckpt.recovery._inventory import Inventory, Item, Reader, Stock, memory_of
from lightning_moe_ckpt.snapshot._shards import as_memoryview
from lightning_moe_ckpt.storage._commit import await_markers, publish
from lightning_moe_ckpt.storage._log import Cut, History, Log
from lightning_moe_ckpt.storage._markers import StoredMarker
from lightning_moe_ckpt.storage._names import commit_key, log_key, marker_key, parse_snap_key
from lightning_moe_ckpt.testing._attempts import Fit, free_port
from lightning_moe_ckpt.testing._kill import HookPhase, Phase, settle
from lightning_moe_ckpt.testing._records import JsonLines, bits, digest, read_lines
from lightning_moe_ckpt.tiers._delta import Baseline, DeltaDecoder, EncodedDelta, encode_delta
from lightning_moe_ckpt.tiers._peer_stream import NotReplicated, Pacer, Replication
from lightning_moe_ckpt.tiers._peer_writer import PeerWorker
from lightning_moe_ckpt.tiers._shm import (
    DIRECTORY_VARIABLE,
    MemoryName,
    SharedFile,
    marker_path,
    marker_paths,
    memory_files,
    unfinished_path,
)
from lightning_moe_ckpt.tiers._tier_worker import WriteJob
