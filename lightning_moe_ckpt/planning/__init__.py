"""Plans of windows: measuring, agreeing between ranks, planning. Internal: may change in any version."""

from lightning_moe_ckpt.planning._background import PlanMaker as PlanMaker
from lightning_moe_ckpt.planning._ledger import LedgerKeeper as LedgerKeeper
from lightning_moe_ckpt.planning._ledger import LossFigures as LossFigures
from lightning_moe_ckpt.planning._planning import Planner as Planner
