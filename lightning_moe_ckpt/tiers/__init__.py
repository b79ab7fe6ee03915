"""Keep generations in memory of this node, in memory of other nodes and in storage.

All tiers have the same short contract (`Tier`). Recovery asks them in order of cost, for each operator.

Internal: may change in any version.
"""

from lightning_moe_ckpt.tiers._delta import DeltaFigures as DeltaFigures
from lightning_moe_ckpt.tiers._delta_plan import Gradients as Gradients
from lightning_moe_ckpt.tiers._delta_plan import PartGradient as PartGradient
from lightning_moe_ckpt.tiers._delta_plan import StepSettings as StepSettings
from lightning_moe_ckpt.tiers._delta_plan import aligned_gradient as aligned_gradient
from lightning_moe_ckpt.tiers._delta_plan import gradient_nbytes as gradient_nbytes
from lightning_moe_ckpt.tiers._holders import FailureDomain as FailureDomain
from lightning_moe_ckpt.tiers._holders import ReplicaPlacement as ReplicaPlacement
from lightning_moe_ckpt.tiers._holders import Survival as Survival
from lightning_moe_ckpt.tiers._holders import machine_name as machine_name
from lightning_moe_ckpt.tiers._holders import percent as percent
from lightning_moe_ckpt.tiers._holders import place_replicas as place_replicas
from lightning_moe_ckpt.tiers._holders import survival_probability as survival_probability
from lightning_moe_ckpt.tiers._holders import this_domain as this_domain
from lightning_moe_ckpt.tiers._host_writer import RING_HEADROOM as RING_HEADROOM
from lightning_moe_ckpt.tiers._host_writer import HostWorker as HostWorker
from lightning_moe_ckpt.tiers._host_writer import RingRoom as RingRoom
from lightning_moe_ckpt.tiers._host_writer import Rings as Rings
from lightning_moe_ckpt.tiers._host_writer import claim_memory as claim_memory
from lightning_moe_ckpt.tiers._host_writer import has_plenty as has_plenty
from lightning_moe_ckpt.tiers._mirrors import Mirroring as Mirroring
from lightning_moe_ckpt.tiers._mirrors import RedundancyFigures as RedundancyFigures
from lightning_moe_ckpt.tiers._mirrors import mirroring_of as mirroring_of
from lightning_moe_ckpt.tiers._peer_writer import PeerRoom as PeerRoom
from lightning_moe_ckpt.tiers._peer_writer import PeerWorker as PeerWorker
from lightning_moe_ckpt.tiers._peer_writer import join_peers as join_peers
from lightning_moe_ckpt.tiers._rank_memory import MemoryClaim as MemoryClaim
from lightning_moe_ckpt.tiers._rank_memory import RankMemory as RankMemory
from lightning_moe_ckpt.tiers._readers import CHEAPEST as CHEAPEST
from lightning_moe_ckpt.tiers._readers import DEFAULT_MAX_CHUNK as DEFAULT_MAX_CHUNK
from lightning_moe_ckpt.tiers._readers import HOST as HOST
from lightning_moe_ckpt.tiers._readers import PEER as PEER
from lightning_moe_ckpt.tiers._readers import STORAGE as STORAGE
from lightning_moe_ckpt.tiers._readers import Elastic as Elastic
from lightning_moe_ckpt.tiers._readers import Holding as Holding
from lightning_moe_ckpt.tiers._readers import HostTier as HostTier
from lightning_moe_ckpt.tiers._readers import ObjectTier as ObjectTier
from lightning_moe_ckpt.tiers._readers import SessionConfig as SessionConfig
from lightning_moe_ckpt.tiers._readers import Tier as Tier
from lightning_moe_ckpt.tiers._readers import TierName as TierName
from lightning_moe_ckpt.tiers._ring import SegmentRing as SegmentRing
from lightning_moe_ckpt.tiers._ring_state import PAGE_NBYTES as PAGE_NBYTES
from lightning_moe_ckpt.tiers._ring_state import Slot as Slot
from lightning_moe_ckpt.tiers._sealed import Markers as Markers
from lightning_moe_ckpt.tiers._sealed import SealedFile as SealedFile
from lightning_moe_ckpt.tiers._sealed import SealedSegment as SealedSegment
from lightning_moe_ckpt.tiers._sealed import StepRecord as StepRecord
from lightning_moe_ckpt.tiers._sealed import is_differential as is_differential
from lightning_moe_ckpt.tiers._sealed import is_partial as is_partial
from lightning_moe_ckpt.tiers._shm import room_nbytes as room_nbytes
from lightning_moe_ckpt.tiers._shm import shared_directory as shared_directory
from lightning_moe_ckpt.tiers._shm import shared_name as shared_name
from lightning_moe_ckpt.tiers._storage_writer import BadCopy as BadCopy
from lightning_moe_ckpt.tiers._storage_writer import PersistWorker as PersistWorker
from lightning_moe_ckpt.tiers._storage_writer import Scrubber as Scrubber
from lightning_moe_ckpt.tiers._tier_worker import Base as Base
from lightning_moe_ckpt.tiers._tier_worker import MissedWindows as MissedWindows
from lightning_moe_ckpt.tiers._tier_worker import SkipCounter as SkipCounter
from lightning_moe_ckpt.tiers._tier_worker import TierWorker as TierWorker
from lightning_moe_ckpt.tiers._tier_worker import WriteRequest as WriteRequest
