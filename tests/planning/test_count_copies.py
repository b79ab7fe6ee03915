"""Counts that are copied early are the counts, each once, and whoever takes them does not wait for what came later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import LoadCounter, discover
from lightning_moe_ckpt.planning._ledger import CountCopies

NUM_EXPERTS, TOP_K = 6, 2


class Counted:
    """A layer whose tokens are counted twice: in the way under test, and by a counter that is read at once."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(3)
        self.layer = MoELayer(8, 16, NUM_EXPERTS, top_k=TOP_K).to(device)
        self.counters = [LoadCounter(discover(self.layer), self.layer) for _ in range(2)]
        for counter in self.counters:
            counter.install()
        self.copies, self.device = CountCopies(self.counters[0]), device

    def batch(self, tokens: int) -> Tensor:
        """Forward and backward; what was counted in it."""
        self.copies.forward_begins()
        self.layer(torch.randn(tokens, 8, device=self.device)).sum().backward()
        counted_E = self.counters[1].read_and_reset().cpu()
        assert int(counted_E.sum()) == tokens * TOP_K
        return counted_E


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def counted(request: pytest.FixtureRequest) -> Counted:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return Counted(request.param)


def test_every_token_is_taken_once(counted: Counted) -> None:
    """Whether copies began before one boundary, before several, or never."""
    now_E = counted.batch(5)
    counted.copies.start()
    assert counted.copies.take() == now_E.tolist()
    assert counted.copies.take() == [0] * NUM_EXPERTS, "nothing was counted since"
    total_E = counted.batch(7) + counted.batch(3)
    counted.copies.start()
    total_E += counted.batch(4)
    counted.copies.start()
    assert counted.copies.take() == total_E.tolist()
    later_E = counted.batch(6)
    assert counted.copies.take() == later_E.tolist(), "no copy had begun"


def test_batches_after_the_copy_are_there_too(counted: Counted) -> None:
    """The counter goes on while the copy is under way."""
    early_E = counted.batch(5)
    counted.copies.start()
    late_E = counted.batch(9)
    assert counted.copies.take() == (early_E + late_E).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_nobody_waits_for_what_the_device_does_after_backward() -> None:
    """The optimizer's kernels are still under way when the counts are there."""
    counted = Counted("cuda")
    now_E = counted.batch(5)
    counted.copies.start()
    torch.cuda._sleep(2 * 10**9)  # type: ignore[no-untyped-call]  # about a second
    assert counted.copies.take() == now_E.tolist()
    assert not torch.cuda.current_stream().query()
