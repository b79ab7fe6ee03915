"""From what survived to bytes in memory: which generation all ranks can resume from, and bringing each its part.

No step here needs a restart: a copy that turns out bad or gone is replaced by the next, record by record, and a
generation of which something is bad everywhere by the next older one.
"""

from lightning_moe_ckpt.recovery._assembly import Assembly as Assembly
from lightning_moe_ckpt.recovery._assembly import Request as Request
from lightning_moe_ckpt.recovery._assembly import Wanted as Wanted
from lightning_moe_ckpt.recovery._assembly import described as described
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt as RestoreAttempt
from lightning_moe_ckpt.recovery._attempt import Restored as Restored
from lightning_moe_ckpt.recovery._attempt import RestorePlan as RestorePlan
from lightning_moe_ckpt.recovery._attempt import ShardSource as ShardSource
from lightning_moe_ckpt.recovery._found import RestoreSource as RestoreSource
from lightning_moe_ckpt.recovery._index import Replicas as Replicas
from lightning_moe_ckpt.recovery._index import stored_index as stored_index
from lightning_moe_ckpt.recovery._inventory import Inventory as Inventory
from lightning_moe_ckpt.recovery._inventory import Replica as Replica
from lightning_moe_ckpt.recovery._inventory import Stock as Stock
from lightning_moe_ckpt.recovery._inventory import Version as Version
from lightning_moe_ckpt.recovery._inventory import memory_of as memory_of
from lightning_moe_ckpt.recovery._inventory import plain_versions as plain_versions
from lightning_moe_ckpt.recovery._inventory import version_of as version_of
from lightning_moe_ckpt.recovery._loading import load_found as load_found
from lightning_moe_ckpt.recovery._opener import RunOpener as RunOpener
from lightning_moe_ckpt.recovery._orphans import is_superseded as is_superseded
from lightning_moe_ckpt.recovery._reader import Reader as Reader
from lightning_moe_ckpt.recovery._replay import Replay as Replay
from lightning_moe_ckpt.recovery._rounds import Transport as Transport
from lightning_moe_ckpt.recovery._search import ResumeRequest as ResumeRequest
