"""Router probabilities and capacity: once per training forward, from the values that the forward itself computed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import LoadCounter, discover
from lightning_moe_ckpt.operators._count_taps import find_score
from lightning_moe_ckpt.operators._counts import Measure

# Shape suffixes: T tokens, K top-k, E experts.

E = 4


class StackedExperts(nn.Module):
    """Stacked experts as Hugging Face calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(E, 4, 6)), nn.Parameter(torch.randn(E, 6, 4))

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        idx = top_k_index[:, 0]
        return torch.einsum("td,tdf,tfe->te", x, self.w1[idx], self.w2[idx]) * top_k_weights[:, :1]


class Router(nn.Module):
    """Emits logits, weights and indices, as Hugging Face's routers do."""

    def __init__(self, score: str = "softmax") -> None:
        super().__init__()
        self.weight, self.score = nn.Parameter(torch.randn(E, 4)), score

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = x @ self.weight.T
        weight_TK, idx_TK = self.probs(x).topk(2)
        return logits_TE, 2.5 * weight_TK / weight_TK.sum(-1, keepdim=True), idx_TK

    def probs(self, x: Tensor) -> Tensor:
        logits_TE = x @ self.weight.T
        return logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(-1)


class Stacked(nn.Module):
    def __init__(self, score: str = "softmax") -> None:
        super().__init__()
        self.router, self.experts = Router(score), StackedExperts()

    def forward(self, x: Tensor) -> Tensor:
        *_, weight, idx = self.router(x)
        out: Tensor = self.experts(x, idx, weight)
        return out

    def probs(self, x: Tensor) -> Tensor:
        return self.router.probs(x)


class SigmoidStacked(Stacked):
    def __init__(self) -> None:
        super().__init__("sigmoid")


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, E)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(E)])

    def forward(self, x: Tensor) -> Tensor:
        idx, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for j, expert in enumerate(self.experts):
            out = out.index_add(0, (idx == j).nonzero()[:, 0], expert(x[idx == j]))
        return out

    def probs(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.gate.weight, self.gate.bias).softmax(-1)


class Own(MoELayer):
    def __init__(self, capacity_factor: float = 1.0) -> None:
        super().__init__(4, 6, E, top_k=2, capacity_factor=capacity_factor)

    def probs(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.gate.weight).softmax(-1)


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

    @torch.no_grad()
    def manual(self, x: Tensor) -> Tensor:
        sums = []
        for block in self.blocks:
            probs: Any = block.probs
            sums.append(probs(x).sum(0, dtype=torch.float64))
            x = block.eval()(x)
            block.train()
        return torch.cat(sums)


@pytest.fixture(params=[Stacked, SigmoidStacked, Listed, Own])
def kind(request: pytest.FixtureRequest) -> type[Any]:
    torch.manual_seed(0)
    cls: type[Any] = request.param
    return cls


def counting(model: nn.Module, measure: Measure) -> LoadCounter:
    counter = LoadCounter(discover(model), model, measure)
    counter.install()
    return counter


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_probabilities_are_summed_once_per_training_forward(kind: type[Any], use_reentrant: bool | None) -> None:
    """Bit for bit those of the forward; what activation checkpointing recomputes and what is evaluated is left out."""
    model = Model(kind, use_reentrant)
    counter = counting(model, "probabilities")
    xs = [torch.randn(32, 4, requires_grad=True) for _ in range(2)]
    for x in xs:
        model(x).sum().backward()
    model.eval()
    model(xs[0])
    model.train()
    got = counter.read_and_reset()
    assert torch.equal(got, model.manual(xs[0]) + model.manual(xs[1]))
    assert not counter.read_and_reset().any()


def test_watching_probabilities_changes_no_bit_and_keeps_no_graph(kind: type[Any]) -> None:
    """Outputs, gradients and generators are those of a forward that nobody watches."""

    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(16, 4, requires_grad=True)
        out = model(x)
        out.sum().backward()
        assert x.grad is not None
        return [out, x.grad, torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)]

    model = Model(kind)
    want = run(model)
    model.zero_grad()
    counters = [counting(model, "probabilities"), counting(model, "tokens")]
    got = run(model)
    assert len(want) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert not counters[0].read_and_reset().requires_grad
    for counter in counters:
        counter.remove()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_sums_of_low_precision_routers_keep_growing() -> None:
    """In bf16 a sum of halves stops at 256."""
    model = Listed().bfloat16()
    nn.init.zeros_(model.gate.weight)
    nn.init.zeros_(model.gate.bias)
    counter = counting(model, "probabilities")
    model(torch.randn(4096, 4, dtype=torch.bfloat16))
    assert counter.read_and_reset().tolist() == [1024.0] * 4


def test_the_gates_noise_is_part_of_its_probabilities() -> None:
    """What chose the experts is what is summed."""
    layer = MoELayer(4, 6, E, top_k=1, noisy_gate=True)
    counter, seen = counting(layer, "probabilities"), list[Tensor]()
    layer.probabilities.register_forward_hook(lambda _m, _a, out: seen.append(out))
    for _ in range(2):
        layer(torch.ones(8, 4))
    sums = [p.sum(0, dtype=torch.float64) for p in seen]
    assert torch.equal(counter.read_and_reset(), sums[0] + sums[1])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_capacity_is_that_of_each_forward(use_reentrant: bool | None) -> None:
    """The factor may change between forwards, and forwards differ in tokens; recomputation and evaluation take none."""
    model = Model(Own, use_reentrant)
    counter, want = counting(model, "capacity"), 0
    for factor, tokens in [(1.0, 32), (1.25, 32), (0.5, 20)]:
        for block in model.blocks:
            block.capacity_factor = factor  # type: ignore[assignment]
        model(torch.randn(tokens, 4, requires_grad=True)).sum().backward()
        want += -(-int(2 * factor * tokens) // E)
    model.eval()(torch.randn(99, 4, requires_grad=True))
    assert counter.read_and_reset().tolist() == [want] * (2 * E)


@pytest.mark.parametrize("make", [Stacked, lambda: Own(0.0)])
def test_where_nothing_is_dropped_an_expert_can_take_every_token(make: Any) -> None:
    """Each token at most once."""
    model = make()
    counter = counting(model, "capacity")
    model(torch.randn(2, 12, 4) if isinstance(model, Own) else torch.randn(24, 4))
    assert counter.read_and_reset().tolist() == [24] * E


def test_layers_that_do_not_show_their_capacity_are_known_at_start() -> None:
    """A list of experts may drop or not; nobody can see it from outside."""
    model = Model(Listed)
    assert counting(model, "capacity").uncounted == ("blocks.0", "blocks.1")
    assert counting(model, "probabilities").uncounted == ()


def test_a_router_that_emits_no_value_per_expert_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its experts keep their order; training goes on."""

    class TopOnly(Router):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)[1:]

    model = Stacked()
    model.router = TopOnly()
    counter = counting(model, "probabilities")
    with caplog.at_level(logging.WARNING):
        model(torch.randn(4, 4))
        model(torch.randn(4, 4))
    assert caplog.text.count("`router` emits no value per expert") == 1
    assert not counter.read_and_reset().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_the_score_is_the_one_that_explains_the_weights(
    score: str, dtype: torch.dtype, normalised: bool, top_k: int
) -> None:
    """Whether the router normalises the weights of the chosen, scales them, or stores them in few bits."""
    logits_TE = 2 * torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    probs_TE = logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(-1)
    weight_TK, idx_TK = probs_TE.topk(top_k)
    if normalised and top_k > 1:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    weight_TK = 1.5 * weight_TK
    assert find_score(logits_TE, [logits_TE, weight_TK.to(dtype), idx_TK]) == score


def test_what_are_probabilities_already_is_taken_as_it_is() -> None:
    """And logits without any weights are taken for those of a softmax."""
    logits_TE = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    probs_TE = logits_TE.softmax(-1)
    assert find_score(probs_TE, [probs_TE]) == "none"
    assert find_score(logits_TE, [logits_TE]) == "softmax"
    assert find_score(logits_TE, [torch.zeros(64, 8, dtype=torch.int64), probs_TE, logits_TE]) == "softmax"
