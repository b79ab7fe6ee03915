"""From surviving copies to bytes in memory: the generation that all ranks can resume from, and each rank's part.

No step here needs a restart: a bad or missing copy is replaced by the next, record by record, and a generation with a
record that is bad everywhere by the next older one.

Internal: may change in any version.
"""

from lightning_moe_ckpt.recovery._assembly import Assembly as Assembly
from lightning_moe_ckpt.recovery._assembly import Wanted as Wanted
from lightning_moe_ckpt.recovery._fold import Difference as Difference
from lightning_moe_ckpt.recovery._fold import fold as fold
from lightning_moe_ckpt.recovery._fold import folded as folded
from lightning_moe_ckpt.recovery._frozen import ANY_GRADIENT as ANY_GRADIENT
from lightning_moe_ckpt.recovery._frozen import Frozen as Frozen
from lightning_moe_ckpt.recovery._frozen import Omits as Omits
from lightning_moe_ckpt.recovery._index import Replicas as Replicas
from lightning_moe_ckpt.recovery._index import stored_index as stored_index
from lightning_moe_ckpt.recovery._inventory import Request as Request
from lightning_moe_ckpt.recovery._inventory import Version as Version
from lightning_moe_ckpt.recovery._inventory import is_superseded as is_superseded
from lightning_moe_ckpt.recovery._inventory import stored as stored
from lightning_moe_ckpt.recovery._loading import JournalReader as JournalReader
from lightning_moe_ckpt.recovery._loading import RestoreSource as RestoreSource
from lightning_moe_ckpt.recovery._loading import ResumeRequest as ResumeRequest
from lightning_moe_ckpt.recovery._loading import Retold as Retold
from lightning_moe_ckpt.recovery._loading import follow_found as follow_found
from lightning_moe_ckpt.recovery._loading import load_found as load_found
from lightning_moe_ckpt.recovery._loading import replay_of as replay_of
from lightning_moe_ckpt.recovery._opener import RunOpener as RunOpener
from lightning_moe_ckpt.recovery._outcomes import joined_outcome as joined_outcome
from lightning_moe_ckpt.recovery._replay import Repeats as Repeats
from lightning_moe_ckpt.recovery._replay import Replay as Replay
from lightning_moe_ckpt.recovery._replay import same_bits as same_bits
from lightning_moe_ckpt.recovery._replay import stored_losses as stored_losses
from lightning_moe_ckpt.recovery._transfer import Transport as Transport
