"""From what survived to bytes in memory: which generation all ranks can resume from, and bringing each its part.

No step here needs a restart: a copy that turns out bad or gone is replaced by the next, record by record, and a
generation of which something is bad everywhere by the next older one.
"""

from lightning_moe_ckpt.recovery._assembly import Assembly as Assembly
from lightning_moe_ckpt.recovery._assembly import Request as Request
from lightning_moe_ckpt.recovery._assembly import Wanted as Wanted
from lightning_moe_ckpt.recovery._assembly import described as described
from lightning_moe_ckpt.recovery._attempt import Chosen as Chosen
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt as RestoreAttempt
from lightning_moe_ckpt.recovery._attempt import Restored as Restored
from lightning_moe_ckpt.recovery._attempt import Tile as Tile
from lightning_moe_ckpt.recovery._index import Replicas as Replicas
from lightning_moe_ckpt.recovery._index import stored_index as stored_index
from lightning_moe_ckpt.recovery._inventory import Copy as Copy
from lightning_moe_ckpt.recovery._inventory import Inventory as Inventory
from lightning_moe_ckpt.recovery._inventory import SourceName as SourceName
from lightning_moe_ckpt.recovery._inventory import Stock as Stock
from lightning_moe_ckpt.recovery._inventory import Version as Version
from lightning_moe_ckpt.recovery._inventory import memory_of as memory_of
from lightning_moe_ckpt.recovery._inventory import plain_versions as plain_versions
from lightning_moe_ckpt.recovery._inventory import version_of as version_of
from lightning_moe_ckpt.recovery._reader import Reader as Reader
from lightning_moe_ckpt.recovery._rounds import Transport as Transport
