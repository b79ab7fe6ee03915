"""One `fit` of a Trainer, hook by hook: which state beside parameters is captured and restored, and when.

Internal: may change in any version.
"""

from lightning_moe_ckpt.fit._data import Batches as Batches
from lightning_moe_ckpt.fit._data import OnMismatch as OnMismatch
from lightning_moe_ckpt.fit._data import WatchedData as WatchedData
from lightning_moe_ckpt.fit._run import FitSession as FitSession
from lightning_moe_ckpt.fit._settings import OnChange as OnChange
from lightning_moe_ckpt.fit.in_place._audit import Audits as Audits
from lightning_moe_ckpt.fit.in_place._survivor import InPlace as InPlace
from lightning_moe_ckpt.fit.in_place._survivor import OnlyBeats as OnlyBeats
from lightning_moe_ckpt.fit.in_place._survivor import can_rejoin as can_rejoin
from lightning_moe_ckpt.fit.in_place._survivor import supervisor as supervisor
