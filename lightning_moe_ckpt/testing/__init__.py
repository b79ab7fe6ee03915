"""Contracts and failure injection, shipped so that users can test their own backends. Needs pytest."""

from lightning_moe_ckpt.testing._backend_contract import BackendContract as BackendContract
from lightning_moe_ckpt.testing._crashing_backend import Crashed as Crashed
from lightning_moe_ckpt.testing._crashing_backend import CrashingBackend as CrashingBackend
