"""Small exchanges between ranks, and which versions they run. Internal: may change in any version."""

from lightning_moe_ckpt.coordination._exchange import Exchange as Exchange
from lightning_moe_ckpt.coordination._neighbours import Neighbours as Neighbours
from lightning_moe_ckpt.coordination._segment import Segment as Segment
from lightning_moe_ckpt.coordination._versions import VERSIONS as VERSIONS
from lightning_moe_ckpt.coordination._versions import agreed_versions as agreed_versions
from lightning_moe_ckpt.coordination._versions import in_words as in_words
from lightning_moe_ckpt.coordination._versions import warn_of_other_versions as warn_of_other_versions
