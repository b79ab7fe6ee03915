"""Measurements of what this package costs and gains, each on this machine, side by side with what it replaces."""

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark as Benchmark
from lightning_moe_ckpt.benchmarks._benchmark import Progress as Progress
from lightning_moe_ckpt.benchmarks._machine import Machine as Machine
from lightning_moe_ckpt.benchmarks._native import NativeBench as NativeBench
from lightning_moe_ckpt.benchmarks._overhead import OverheadBench as OverheadBench
from lightning_moe_ckpt.benchmarks._persist import PersistBench as PersistBench
from lightning_moe_ckpt.benchmarks._quality import QualityBench as QualityBench
from lightning_moe_ckpt.benchmarks._recovery import RecoveryBench as RecoveryBench
