"""How evenly experts are used and what checkpoints cost, as metrics of torchmetrics; nothing here needs Lightning."""

from lightning_moe_ckpt.metrics._checkpoint import TIERS as TIERS
from lightning_moe_ckpt.metrics._checkpoint import CapturedPerStep as CapturedPerStep
from lightning_moe_ckpt.metrics._checkpoint import Generations as Generations
from lightning_moe_ckpt.metrics._checkpoint import GoodputShare as GoodputShare
from lightning_moe_ckpt.metrics._checkpoint import PersistedPerSecond as PersistedPerSecond
from lightning_moe_ckpt.metrics._checkpoint import WindowPosition as WindowPosition
from lightning_moe_ckpt.metrics._tokens import ExpertLoad as ExpertLoad
from lightning_moe_ckpt.metrics._tokens import ExpertsTaken as ExpertsTaken
from lightning_moe_ckpt.metrics._tokens import ExpertTokens as ExpertTokens
from lightning_moe_ckpt.metrics._tokens import LoadSkew as LoadSkew
from lightning_moe_ckpt.metrics._tokens import MoementaryLostTokens as MoementaryLostTokens
from lightning_moe_ckpt.metrics._tokens import PortionOfLostTokens as PortionOfLostTokens
from lightning_moe_ckpt.metrics._tokens import TokensAtRisk as TokensAtRisk
from lightning_moe_ckpt.metrics._tokens import load_skew as load_skew
from lightning_moe_ckpt.metrics._tokens import moementary_lost_tokens as moementary_lost_tokens
from lightning_moe_ckpt.metrics._tokens import portion_of_lost_tokens as portion_of_lost_tokens
