"""Capacity boosting after a recovery: what is measured, and what is changed in routers.

Internal: may change in any version.
"""

from lightning_moe_ckpt.boosting._meters import Measured as Measured
from lightning_moe_ckpt.boosting._meters import Meter as Meter
from lightning_moe_ckpt.boosting._meters import meter_of as meter_of
from lightning_moe_ckpt.boosting._routes import BiasRoute as BiasRoute
from lightning_moe_ckpt.boosting._routes import MarginRoute as MarginRoute
from lightning_moe_ckpt.boosting._routes import Route as Route
from lightning_moe_ckpt.boosting._routes import find_bias as find_bias
from lightning_moe_ckpt.boosting._routes import find_router as find_router
