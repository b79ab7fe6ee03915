"""Under plain DistributedDataParallel the hook makes a restarted process give the bits of a warm one."""

from __future__ import annotations

import copy

import torch
from launcher import run_world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_moe_ckpt.parallel import OrderedHookState, ordered_hook


class OutOfOrder(nn.Module):
    """Executes its layers in another order than it registers them, so DDP rebuilds its buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.a, self.c = nn.Linear(150, 150), nn.Linear(150, 150), nn.Linear(150, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return out


def warm_against_fresh(rank: int, *, hooked: bool) -> tuple[int, float]:
    def wrap(module: nn.Module) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(module)
        if hooked:
            wrapped.register_comm_hook(OrderedHookState(), ordered_hook)
        return wrapped

    def gradients(module: DistributedDataParallel) -> Tensor:
        module.zero_grad()
        module(x).pow(2).sum().backward()
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    torch.manual_seed(0)
    model = OutOfOrder()
    x = torch.randn(4, 150, generator=torch.Generator().manual_seed(rank))
    warm = wrap(model)
    for _ in range(3):
        expected = gradients(warm)
    fresh = gradients(wrap(copy.deepcopy(model)))
    return int((fresh != expected).sum()), float((fresh - expected).abs().max())


def test_fresh_ddp_equals_warm_ddp_with_the_hook_and_not_without() -> None:
    """The mean over three ranks does not depend on the age of the process."""

    def work(rank: int) -> tuple[int, int, float]:
        plain, distance = warm_against_fresh(rank, hooked=False)
        hooked, _ = warm_against_fresh(rank, hooked=True)
        return plain, hooked, distance

    for plain, hooked, distance in run_world(3, work):
        assert hooked == 0
        assert plain > 0, "DDP no longer rebuilds its buckets: this test sees nothing"
        assert distance < 1e-4


def test_the_hook_averages() -> None:
    """Its result is the mean over ranks that DDP itself would give, to rounding."""

    def work(rank: int) -> bool:
        results = []
        for hooked in (False, True):
            torch.manual_seed(0)
            model = DistributedDataParallel(OutOfOrder())
            if hooked:
                model.register_comm_hook(OrderedHookState(), ordered_hook)
            model(torch.full((2, 150), float(rank))).sum().backward()
            results.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-6)

    assert all(run_world(3, work))
