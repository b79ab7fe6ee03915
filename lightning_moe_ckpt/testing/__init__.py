"""Contracts and failure injection, shipped so that users can test their own backends and trainings. Needs pytest."""

from lightning_moe_ckpt.testing._backend_contract import BackendContract as BackendContract
from lightning_moe_ckpt.testing._crashing_backend import Crashed as Crashed
from lightning_moe_ckpt.testing._crashing_backend import CrashingBackend as CrashingBackend
from lightning_moe_ckpt.testing._lives import Life as Life
from lightning_moe_ckpt.testing._lives import LifeFailed as LifeFailed
from lightning_moe_ckpt.testing._lives import LifeResult as LifeResult
from lightning_moe_ckpt.testing._lives import assert_same_end as assert_same_end
from lightning_moe_ckpt.testing._lives import run_lives as run_lives
from lightning_moe_ckpt.testing._lives_end import capture_end as capture_end
from lightning_moe_ckpt.testing._lives_end import differences as differences
from lightning_moe_ckpt.testing._lives_kill import Kill as Kill
from lightning_moe_ckpt.testing._seam import Seam as Seam
