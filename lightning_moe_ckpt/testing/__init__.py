"""Provide contract tests and failure injection, with which users test their own backends and trainings.

Contracts need pytest and are missing without it; fault injection works without it.
"""

from importlib.util import find_spec as _find_spec

from lightning_moe_ckpt.testing._crashing_backend import Crashed as Crashed
from lightning_moe_ckpt.testing._crashing_backend import CrashingBackend as CrashingBackend
from lightning_moe_ckpt.testing._fault import Fault as Fault
from lightning_moe_ckpt.testing._fault import fail_at as fail_at
from lightning_moe_ckpt.testing._fault_injector import FaultInjector as FaultInjector
from lightning_moe_ckpt.testing._fault_random import RandomFaults as RandomFaults
from lightning_moe_ckpt.testing._fault_summary import FaultSummary as FaultSummary
from lightning_moe_ckpt.testing._fault_summary import FaultTally as FaultTally
from lightning_moe_ckpt.testing._fault_summary import summarize_faults as summarize_faults
from lightning_moe_ckpt.testing._lives import Attempt as Attempt
from lightning_moe_ckpt.testing._lives import AttemptFailed as AttemptFailed
from lightning_moe_ckpt.testing._lives import AttemptResult as AttemptResult
from lightning_moe_ckpt.testing._lives import assert_same_end as assert_same_end
from lightning_moe_ckpt.testing._lives import run_lives as run_lives
from lightning_moe_ckpt.testing._lives_end import capture_end as capture_end
from lightning_moe_ckpt.testing._lives_end import differences as differences
from lightning_moe_ckpt.testing._lives_kill import Kill as Kill
from lightning_moe_ckpt.testing._proxy import FaultyProxy as FaultyProxy
from lightning_moe_ckpt.testing._proxy import Weather as Weather
from lightning_moe_ckpt.testing._seam import Seam as Seam
from lightning_moe_ckpt.testing._tier_capture import TierHalves as TierHalves

if _find_spec("pytest") is not None:
    from lightning_moe_ckpt.testing._adapter_contract import AdapterContract as AdapterContract
    from lightning_moe_ckpt.testing._backend_contract import BackendContract as BackendContract
    from lightning_moe_ckpt.testing._tier_contract import TierContract as TierContract
