"""How evenly experts are used and what checkpoints cost, as metrics of torchmetrics; nothing here needs Lightning."""

from lightning_moe_ckpt.metrics._checkpoint import TIERS as TIERS
from lightning_moe_ckpt.metrics._checkpoint import CapturedPerStep as CapturedPerStep
from lightning_moe_ckpt.metrics._checkpoint import Generations as Generations
from lightning_moe_ckpt.metrics._checkpoint import PersistedPerSecond as PersistedPerSecond
from lightning_moe_ckpt.metrics._checkpoint import StallPerStep as StallPerStep
from lightning_moe_ckpt.metrics._checkpoint import StallShare as StallShare
from lightning_moe_ckpt.metrics._checkpoint import WindowPosition as WindowPosition
from lightning_moe_ckpt.metrics._load import ExpertLoad as ExpertLoad
from lightning_moe_ckpt.metrics._load import LoadSkew as LoadSkew
from lightning_moe_ckpt.metrics._load import load_skew as load_skew
from lightning_moe_ckpt.metrics._lost import ExpertsTaken as ExpertsTaken
from lightning_moe_ckpt.metrics._lost import ExpertTokens as ExpertTokens
from lightning_moe_ckpt.metrics._lost import MoementaryLostTokens as MoementaryLostTokens
from lightning_moe_ckpt.metrics._lost import PortionOfLostTokens as PortionOfLostTokens
from lightning_moe_ckpt.metrics._lost import TokensAtRisk as TokensAtRisk
from lightning_moe_ckpt.metrics._lost import moementary_lost_tokens as moementary_lost_tokens
from lightning_moe_ckpt.metrics._lost import portion_of_lost_tokens as portion_of_lost_tokens
