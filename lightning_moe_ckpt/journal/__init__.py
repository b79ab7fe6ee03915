"""What a boundary has beside records: a codec of plain values, random state, tensors on their way to the host.

Internal: may change in any version.
"""

from lightning_moe_ckpt.journal._codec import Constant as Constant
from lightning_moe_ckpt.journal._codec import Unread as Unread
from lightning_moe_ckpt.journal._codec import Written as Written
from lightning_moe_ckpt.journal._codec import decode as decode
from lightning_moe_ckpt.journal._codec import encode as encode
from lightning_moe_ckpt.journal._codec import refusals as refusals
from lightning_moe_ckpt.journal._codec import written as written
from lightning_moe_ckpt.journal._fixed import NATIVE as NATIVE
from lightning_moe_ckpt.journal._fixed import Missing as Missing
from lightning_moe_ckpt.journal._fixed import Text as Text
from lightning_moe_ckpt.journal._fixed import fixed as fixed
from lightning_moe_ckpt.journal._fixed import found as found
from lightning_moe_ckpt.journal._fixed import name_of as name_of
from lightning_moe_ckpt.journal._fixed import read_named as read_named
from lightning_moe_ckpt.journal._fixed import same_text as same_text
from lightning_moe_ckpt.journal._journal import UNFIT as UNFIT
from lightning_moe_ckpt.journal._journal import Arrival as Arrival
from lightning_moe_ckpt.journal._journal import Arrivals as Arrivals
from lightning_moe_ckpt.journal._journal import Journal as Journal
from lightning_moe_ckpt.journal._journal import JournalCapacity as JournalCapacity
from lightning_moe_ckpt.journal._journal import JournalOverflow as JournalOverflow
from lightning_moe_ckpt.journal._journal import decode_journal as decode_journal
from lightning_moe_ckpt.journal._journal import differs as differs
from lightning_moe_ckpt.journal._journal import encode_journal as encode_journal
from lightning_moe_ckpt.journal._journal import held as held
from lightning_moe_ckpt.journal._rng import HeldGenerator as HeldGenerator
from lightning_moe_ckpt.journal._rng import RngState as RngState
from lightning_moe_ckpt.journal._rng import capture_rng as capture_rng
from lightning_moe_ckpt.journal._rng import held_state as held_state
from lightning_moe_ckpt.journal._rng import restore_held as restore_held
from lightning_moe_ckpt.journal._rng import restore_rng as restore_rng
from lightning_moe_ckpt.journal._rng import retold_rng as retold_rng
