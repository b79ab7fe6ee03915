"""Provide contract tests and failure injection, with which users test their own backends and trainings.

Contracts need pytest and are missing without it; fault injection works without it.
"""

from importlib.util import find_spec as _find_spec

from lightning_moe_ckpt.testing._attempts import Attempt as Attempt
from lightning_moe_ckpt.testing._attempts import AttemptFailed as AttemptFailed
from lightning_moe_ckpt.testing._attempts import AttemptResult as AttemptResult
from lightning_moe_ckpt.testing._attempts import Seam as Seam
from lightning_moe_ckpt.testing._attempts import assert_same_end as assert_same_end
from lightning_moe_ckpt.testing._attempts import run_attempts as run_attempts
from lightning_moe_ckpt.testing._fault import Fault as Fault
from lightning_moe_ckpt.testing._fault import RandomFaults as RandomFaults
from lightning_moe_ckpt.testing._fault import fail_at as fail_at
from lightning_moe_ckpt.testing._fault_injector import FaultInjector as FaultInjector
from lightning_moe_ckpt.testing._fault_record import FaultSummary as FaultSummary
from lightning_moe_ckpt.testing._fault_record import FaultTally as FaultTally
from lightning_moe_ckpt.testing._fault_record import summarize_faults as summarize_faults
from lightning_moe_ckpt.testing._kill import Kill as Kill
from lightning_moe_ckpt.testing._records import capture_end as capture_end
from lightning_moe_ckpt.testing._records import differences as differences

if _find_spec("pytest") is not None:
    from lightning_moe_ckpt.testing._adapter_contract import AdapterContract as AdapterContract
    from lightning_moe_ckpt.testing._backend_contract import BackendContract as BackendContract
