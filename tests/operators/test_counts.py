"""Token counts: once per training forward, never in evaluation or recomputation, without waiting for the device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators import LoadCounter, MoELayerSpec, discover, register_adapter
from lightning_moe_ckpt.operators._count_taps import TokenCounts
from lightning_moe_ckpt.operators.adapters import unregister_adapter


class Experts(nn.Module):
    """Stacked experts called with indices, as Hugging Face does."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, 4, 6))
        self.w2 = nn.Parameter(torch.randn(num_experts, 6, 4))

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        idx = top_k_index.clamp(min=0)[:, 0]
        return torch.einsum("td,tdf,tfe->te", x, self.w1[idx], self.w2[idx]) * top_k_weights


class Stacked(nn.Module):
    def __init__(self, num_experts: int = 3, dropped: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, num_experts), Experts(num_experts)
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        weight, idx = self.gate(x).softmax(-1).max(-1, keepdim=True)
        if self.dropped:
            idx = torch.where(torch.arange(len(idx))[:, None] % 2 == 0, idx, -1)
        out: Tensor = self.experts(x, top_k_weights=weight, top_k_index=idx)
        return out

    def manual(self, x: Tensor) -> Tensor:
        """Tokens per expert, by hand."""
        return torch.bincount(self.gate(x).argmax(-1), minlength=self.gate.out_features)


class Listed(nn.Module):
    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(4, num_experts)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(num_experts)])

    def forward(self, x: Tensor) -> Tensor:
        idx, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for j, expert in enumerate(self.experts):
            out = out.index_add(0, (idx == j).nonzero()[:, 0], expert(x[idx == j]))
        return out

    def manual(self, x: Tensor) -> Tensor:
        return torch.bincount(self.gate(x).argmax(-1), minlength=len(self.experts))


class Own(MoELayer):
    def __init__(self) -> None:
        super().__init__(4, 6, 3, top_k=1)

    def manual(self, x: Tensor) -> Tensor:
        return torch.bincount(self.gate(x).argmax(-1), minlength=3)


class Model(nn.Module):
    """Two layers, checkpointed or not."""

    def __init__(self, kind: type[Any], use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x

    def manual(self, x: Tensor) -> Tensor:
        counts = []
        for block in self.blocks:
            manual: Any = block.manual
            counts.append(manual(x))
            x = block.eval()(x)
            block.train()
        return torch.cat(counts)


@pytest.fixture(params=[Stacked, Listed, Own])
def kind(request: pytest.FixtureRequest) -> type[Any]:
    torch.manual_seed(0)
    cls: type[Any] = request.param
    return cls


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_each_training_forward_counts_once(kind: type[Any], use_reentrant: bool | None) -> None:
    """Activation checkpointing runs the forward twice; it is counted once."""
    model = Model(kind, use_reentrant)
    counter = LoadCounter(discover(model), model)
    counter.install()
    x = torch.randn(32, 4, requires_grad=True)
    with torch.no_grad():
        want = model.manual(x)
    model(x).sum().backward()
    got = counter.read_and_reset()
    assert torch.equal(got, want)
    assert got.dtype == torch.int64
    assert got.sum() == 64


def test_evaluation_does_not_count(kind: type[Any]) -> None:
    """Validation between two steps must not change what was popular in training."""
    model = Model(kind)
    counter = LoadCounter(discover(model), model)
    counter.install()
    model.eval()
    model(torch.randn(8, 4))
    assert not counter.read_and_reset().any()


def test_counts_add_up_until_read_and_stop_when_removed(kind: type[Any]) -> None:
    """Gradient accumulation adds; after `remove` nothing is hooked any more."""
    model = Model(kind)
    counter = LoadCounter(discover(model), model)
    counter.install()
    counter.install()
    for _ in range(3):
        model(torch.randn(8, 4))
    assert counter.read_and_reset().sum() == 48
    model(torch.randn(8, 4))
    counter.remove()
    model(torch.randn(8, 4))
    assert counter.read_and_reset().sum() == 16
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_counting_changes_no_bit(kind: type[Any]) -> None:
    """Hooks neither draw random numbers nor change values."""
    model = Model(kind)
    x = torch.randn(16, 4)
    torch.manual_seed(1)
    want, want_rng = model(x), torch.get_rng_state()
    counter = LoadCounter(discover(model), model)
    counter.install()
    torch.manual_seed(1)
    assert torch.equal(model(x), want)
    assert torch.equal(torch.get_rng_state(), want_rng)


def test_a_layers_own_counter_is_left_to_its_other_readers() -> None:
    """Metrics read it too, and may reset it."""
    model = Own()
    model(torch.randn(8, 4))
    counter = LoadCounter(discover(model), model)
    counter.install()
    model(torch.randn(8, 4))
    assert counter.read_and_reset().sum() == 8
    assert model.tokens_per_expert.sum() == 16
    assert not counter.read_and_reset().any()
    model.read_and_reset_counts()
    model(torch.randn(4, 4))
    assert counter.read_and_reset().sum() == 4


def test_dropped_slots_are_not_counted() -> None:
    """An index of -1 marks a slot over capacity."""
    model = Stacked(dropped=True)
    counter = LoadCounter(discover(model), model)
    counter.install()
    x = torch.randn(16, 4)
    model(x)
    assert torch.equal(counter.read_and_reset(), model.manual(x[::2]))


def test_indices_outside_are_dropped() -> None:
    """Sentinels of expert-parallel libraries point one past the last expert."""
    counts = TokenCounts(3)
    counts.add_indices(torch.tensor([[0, 3], [2, -1], [2, 99]], dtype=torch.int32))
    assert counts.take().tolist() == [1, 0, 2]
    assert counts.take().tolist() == [0, 0, 0]


def test_a_model_without_experts_has_no_counts() -> None:
    """The vector is empty, not missing."""
    model = nn.Linear(2, 2)
    counter = LoadCounter(discover(model), model)
    counter.install()
    assert counter.read_and_reset().shape == (0,)


def test_a_layer_without_a_tap_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """An adapter need not count; then the log says that order is fixed."""

    def describe(fqn: str, module: nn.Module, index: object) -> MoELayerSpec:
        spec = discovered.layers[0]
        return MoELayerSpec(
            fqn=fqn, num_experts=3, local_expert_ids=(0, 1, 2), experts=spec.experts, router=spec.router
        )

    model = Stacked()
    discovered = discover(model)
    register_adapter(Stacked, describe)
    try:
        counter = LoadCounter(discover(model), model)
    finally:
        unregister_adapter(Stacked)
    with caplog.at_level(logging.WARNING):
        counter.install()
    assert counter.uncounted == ("",)
    assert "fixed order" in caplog.text
    model(torch.randn(4, 4))
    assert counter.read_and_reset().tolist() == [0, 0, 0]


def test_torch_still_says_when_backward_runs() -> None:
    """The question is asked of a private function; this fails when it goes away."""
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            seen.append(in_backward())
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(in_backward())
            return grads[0]

    Spy.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    assert seen == [False, True]
    assert not in_backward()
