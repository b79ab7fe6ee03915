"""How evenly experts are used, as metrics of torchmetrics; nothing here needs Lightning."""

from lightning_moe_ckpt.metrics._load import ExpertLoad as ExpertLoad
from lightning_moe_ckpt.metrics._load import LoadSkew as LoadSkew
from lightning_moe_ckpt.metrics._load import load_skew as load_skew
