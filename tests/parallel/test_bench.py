"""The benchmark runs."""

from __future__ import annotations

from lightning_moe_ckpt.parallel._bench import bench_reduction


def test_every_variant_is_measured() -> None:
    """A tiny model at two ranks."""
    (cost,) = bench_reduction([2], width=8, depth=2, repeats=2)
    assert cost.world_size == 2
    assert cost.nbytes == 512
    assert cost.collective.keys() == {"ordered", "allreduce"}
    assert cost.step.keys() == {"none", "ordered", "allreduce", "ddp", "ddp+hook"}
    assert all(seconds > 0 for seconds in [*cost.collective.values(), *cost.step.values()])
