"""Keep generations in memory of this node, in memory of other nodes and in storage.

All tiers have the same short contract (`Tier`). Recovery asks them in order of cost, for each operator.
"""

from lightning_moe_ckpt.tiers._contract import Holding as Holding
from lightning_moe_ckpt.tiers._contract import Tier as Tier
from lightning_moe_ckpt.tiers._delta import Baseline as Baseline
from lightning_moe_ckpt.tiers._delta import DeltaDecoder as DeltaDecoder
from lightning_moe_ckpt.tiers._delta import EncodedDelta as EncodedDelta
from lightning_moe_ckpt.tiers._delta import Gradients as Gradients
from lightning_moe_ckpt.tiers._delta import PartGradient as PartGradient
from lightning_moe_ckpt.tiers._delta import StepSettings as StepSettings
from lightning_moe_ckpt.tiers._delta import encode_delta as encode_delta
from lightning_moe_ckpt.tiers._delta_plan import aligned_gradient as aligned_gradient
from lightning_moe_ckpt.tiers._delta_plan import gradient_nbytes as gradient_nbytes
from lightning_moe_ckpt.tiers._domains import FailureDomain as FailureDomain
from lightning_moe_ckpt.tiers._domains import expect_domains as expect_domains
from lightning_moe_ckpt.tiers._domains import this_domain as this_domain
from lightning_moe_ckpt.tiers._host import HostTier as HostTier
from lightning_moe_ckpt.tiers._names import shared_name as shared_name
from lightning_moe_ckpt.tiers._object import ObjectTier as ObjectTier
from lightning_moe_ckpt.tiers._peer import DEFAULT_MAX_CHUNK as DEFAULT_MAX_CHUNK
from lightning_moe_ckpt.tiers._peer import Replication as Replication
from lightning_moe_ckpt.tiers._peer_store import COPIES as COPIES
from lightning_moe_ckpt.tiers._peer_stream import NotReplicated as NotReplicated
from lightning_moe_ckpt.tiers._placement import Placement as Placement
from lightning_moe_ckpt.tiers._placement import place_replicas as place_replicas
from lightning_moe_ckpt.tiers._rank_memory import MemoryClaim as MemoryClaim
from lightning_moe_ckpt.tiers._rank_memory import RankMemory as RankMemory
from lightning_moe_ckpt.tiers._rank_memory import unused_memory as unused_memory
from lightning_moe_ckpt.tiers._ring import SegmentRing as SegmentRing
from lightning_moe_ckpt.tiers._ring import Slot as Slot
from lightning_moe_ckpt.tiers._ring import slots_needed as slots_needed
from lightning_moe_ckpt.tiers._shm import expect_room as expect_room
from lightning_moe_ckpt.tiers._shm import shared_directory as shared_directory
from lightning_moe_ckpt.tiers._shm import unlink_shared_file as unlink_shared_file
from lightning_moe_ckpt.tiers._survival import Survival as Survival
from lightning_moe_ckpt.tiers._survival import percent as percent
from lightning_moe_ckpt.tiers._survival import survival_probability as survival_probability
from lightning_moe_ckpt.tiers._survival import survival_summary as survival_summary
