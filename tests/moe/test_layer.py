"""The layer computes what a loop over tokens and experts computes, and counts every token once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.parallel import ExpertParallelModule, ParallelGroups, expert_parallel_fqns, set_current_groups

D, F_, E = 8, 12, 4


def build(seed: int = 0, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(D, F_, E, **options)


def tokens(num_tokens: int = 10, seed: int = 5) -> Tensor:
    return torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(seed))


def reference(layer: MoELayer, x_TD: Tensor, capacity: int | Tensor | None = None) -> tuple[Tensor, list[int]]:
    """One token after the other, first choices of all before second ones."""
    probs_TE = layer.gate(x_TD).softmax(-1)
    weight_TK, idx_TK = probs_TE.topk(layer.top_k)
    if layer.normalize_gate and layer.top_k > 1:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    out_TD, load = torch.zeros_like(x_TD), [0] * layer.num_experts
    for k in range(layer.top_k):
        for t in range(x_TD.shape[0]):
            e = int(idx_TK[t, k])
            if capacity is None or load[e] < (int(capacity[e]) if isinstance(capacity, Tensor) else capacity):
                load[e] += 1
                out_TD[t] = out_TD[t] + weight_TK[t, k] * expert(layer, e, x_TD[t])
    return out_TD, load


def expert(layer: MoELayer, e: int, x_D: Tensor) -> Tensor:
    h = x_D @ layer.w1[e] + (0 if layer.b1 is None else layer.b1[e])
    return layer.activation(h) @ layer.w2[e] + (0 if layer.b2 is None else layer.b2[e])


def gradients_of(layer: MoELayer, output: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    layer.zero_grad()
    x = tokens().requires_grad_()
    torch.autograd.backward(output(x).pow(2).sum())
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {**grads, "x": x.grad}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 2, "normalize_gate": False},
        {"bias": False, "activation": "silu"},
        {"activation": torch.tanh},
        {"capacity_factor": 0.5},
        {"capacity_factor": 0.9, "top_k": 1},
        {"capacity_factor": [0.2, 1.0, 0.5, 2.0]},
    ],
    ids=lambda options: str({key: getattr(value, "__name__", value) for key, value in options.items()}),
)
def test_output_and_gradients_equal_a_loop_over_tokens(options: dict[str, Any]) -> None:
    """Forward, and backward into every parameter and the input."""
    layer = build(**options)
    capacity = layer.capacity(10)
    torch.testing.assert_close(layer(tokens()), reference(layer, tokens(), capacity)[0])
    got = gradients_of(layer, layer)
    want = gradients_of(layer, lambda x: reference(layer, x, capacity)[0])
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name])


def test_capacity_drops_last_choices_and_last_tokens_first_and_both_are_counted() -> None:
    """Processed and dropped slots add up to what the gate chose."""
    layer = build(capacity_factor=0.5)
    assert layer.capacity(10) == 3
    layer(tokens())
    _, load = reference(layer, tokens(), 3)
    chosen = torch.bincount(layer.gate(tokens()).topk(2).indices.flatten(), minlength=E)
    assert chosen.max() > 3
    assert layer.tokens_per_expert.tolist() == load
    dropped = layer.read_and_reset_drops()
    assert dropped.sum() > 0
    assert (layer.read_and_reset_counts() + dropped).tolist() == chosen.tolist()


def test_counts_add_up_over_training_forwards_and_reset() -> None:
    """Dropless: every token counts `top_k` times; evaluation does not count; reading starts again from zero."""
    layer = build()
    layer(tokens())
    with torch.no_grad():
        layer(tokens(7))
    layer.eval()
    layer(tokens(100))
    layer.train()
    counts = layer.read_and_reset_counts()
    assert counts.dtype == torch.int64
    assert counts.sum() == 2 * 17
    assert layer.tokens_per_expert.sum() == 0
    layer(tokens(3))
    assert layer.read_and_reset_counts().sum() == 6
    assert counts.sum() == 2 * 17, "what was read is a copy"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_does_not_count_twice(use_reentrant: bool) -> None:
    """The forward is repeated in backward; only the first one counts."""
    layer = build()
    calls: list[int] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    x = tokens().requires_grad_()
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert len(calls) == 2
    assert layer.tokens_per_expert.sum() == 20


def test_recomputation_is_known_to_torch() -> None:
    """The private name the counter relies on exists; without it checkpointed forwards would count twice."""
    assert torch._C._current_graph_task_id() == -1


def test_three_dimensions_are_tokens_in_order() -> None:
    """A batch of sequences gives what its flattened tokens give."""
    layer = build()
    x = tokens(12)
    assert torch.equal(layer(x.view(3, 4, D)), layer(x).view(3, 4, D))


def test_no_tokens_is_no_error() -> None:
    """An empty batch has an empty output, a zero loss, and zero gradients for every expert."""
    layer = build()
    y = layer(torch.empty(0, D))
    assert y.shape == (0, D)
    assert layer.l_aux is not None
    (y.sum() + layer.l_aux).backward()
    assert all(p.grad is not None and not p.grad.any() for _, p in layer.expert_parameters())


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    """Stacked parameters have a gradient in every step, so the optimizer treats all experts alike."""
    layer = build(top_k=1)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.weight[2] = 1.0
    layer(torch.ones(5, D)).sum().backward()
    assert layer.w1.grad is not None
    assert layer.w1.grad[2].any()
    assert not layer.w1.grad[[0, 1, 3]].any()


def test_the_balancing_loss_is_gshards() -> None:
    """`E * sum(mean probability * share of first choices)`; 1 when both are even; differentiable."""
    layer = build()
    layer(tokens())
    probs = layer.gate(tokens()).softmax(-1)
    share = F.one_hot(probs.argmax(-1), E).float().mean(0)
    assert layer.l_aux is not None
    torch.testing.assert_close(layer.l_aux, E * (probs.mean(0) * share).sum())
    torch.autograd.backward(layer.l_aux)
    assert layer.gate.weight.grad is not None
    assert layer.gate.weight.grad.any()


def test_noise_changes_the_choice_in_training_only() -> None:
    """It draws from the global random state, so a restored state repeats it."""
    layer = build(noisy_gate=True)
    state = torch.get_rng_state()
    first = layer(tokens(200))
    assert not torch.equal(layer(tokens(200)), first)
    torch.set_rng_state(state)
    assert torch.equal(layer(tokens(200)), first)
    layer.eval()
    state = torch.get_rng_state()
    assert torch.equal(layer(tokens(200)), layer(tokens(200)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("gate_fp32", [False, True])
def test_bf16_autocast_and_bf16_parameters(gate_fp32: bool) -> None:
    """Output keeps the dtype of the input, gradients that of the parameters, and both are near fp32's."""
    layer = build(gate_fp32=gate_fp32, top_k=4)  # all experts: rounding cannot change the choice
    want = layer(tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(tokens())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    got.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    low = copy.deepcopy(layer).bfloat16()
    got = low(tokens().bfloat16())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)
    got.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in low.parameters())


def test_an_fp32_gate_ignores_autocast() -> None:
    """Its choice and weights are those of fp32, in bits."""
    layer = build(gate_fp32=True)
    layer(tokens())
    want = layer.l_aux
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(tokens())
    assert want is not None
    assert layer.l_aux is not None
    assert torch.equal(layer.l_aux, want)


def test_backward_repeats_bit_for_bit() -> None:
    """Sorting, gathering and adding have one order."""
    layer = build(top_k=3, capacity_factor=0.7)
    first, second = gradients_of(layer, layer), gradients_of(layer, layer)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_output_requires_a_gradient_even_if_everything_is_frozen() -> None:
    """So that ranks with frozen experts still reach the collectives of backward."""
    layer = build().requires_grad_(False)
    assert layer(tokens()).requires_grad
    with torch.no_grad():
        assert not layer(tokens()).requires_grad


def test_a_layer_that_has_run_copies_and_pickles() -> None:
    """The graph behind `l_aux` stays behind."""
    layer = build()
    layer(tokens())
    assert layer.l_aux is not None
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301
        assert other.l_aux is None
        assert torch.equal(other(tokens()), layer(tokens()))


def test_counts_are_not_in_the_state_dict_nor_among_the_buffers() -> None:
    """Checkpoints of other code do not meet them, and DDP does not overwrite them with rank 0's."""
    layer = build()
    assert set(layer.state_dict()) == {"gate.weight", "w1", "b1", "w2", "b2"}
    assert not list(layer.buffers())


def test_parameters_by_role() -> None:
    """Every parameter is the router's or the experts'; none is sharded in a world of one."""
    layer = build()
    roles = [name for name, _ in layer.router_parameters()] + [name for name, _ in layer.expert_parameters()]
    assert sorted(roles) == sorted(name for name, _ in layer.named_parameters())
    assert isinstance(layer, ExpertParallelModule)
    assert expert_parallel_fqns(torch.nn.Sequential(layer)) == set()


class TestSharding:
    """Which experts a rank holds, without any process group."""

    @staticmethod
    def build_at(ep_rank: int, ep_size: int) -> MoELayer:
        set_current_groups(ParallelGroups(rank=ep_rank, world_size=ep_size, ep_rank=ep_rank, ep_size=ep_size))
        try:
            return build()
        finally:
            set_current_groups(None)

    def test_a_rank_holds_its_part_of_the_experts_of_one_process(self) -> None:
        """The same gate everywhere, and the same global random state afterwards."""
        whole = build()
        state = torch.get_rng_state()
        for ep_rank in range(2):
            part = self.build_at(ep_rank, 2)
            assert torch.equal(torch.get_rng_state(), state)
            assert list(part.local_expert_ids) == [2 * ep_rank, 2 * ep_rank + 1]
            assert (part.num_experts, part.num_local_experts, part.ep_size) == (4, 2, 2)
            assert torch.equal(part.gate.weight, whole.gate.weight)
            for name, parameter in part.expert_parameters():
                assert torch.equal(parameter, whole.get_parameter(name).chunk(2)[ep_rank])
            assert expert_parallel_fqns(torch.nn.Sequential(part)) == {"0.w1", "0.b1", "0.w2", "0.b2"}

    def test_it_says_that_its_world_is_gone(self) -> None:
        """Running a sharded layer without its ranks would give wrong results silently."""
        with pytest.raises(ConfigurationError, match=r"built for `expert_parallel=2`.*1 is in force"):
            self.build_at(0, 2)(tokens())

    def test_experts_that_cannot_be_shared_are_refused(self) -> None:
        """The error names both numbers."""
        with pytest.raises(ConfigurationError, match=r"num_experts=4.*expert_parallel=3"):
            self.build_at(0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k=5"),
        ({"top_k": 0}, "top_k=0"),
        ({"capacity_factor": -1.0}, r"capacity_factor=-1\.0"),
        ({"activation": "mish"}, "activation='mish'"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    """The error quotes the argument."""
    with pytest.raises(ConfigurationError, match=message):
        build(**options)


def test_all_weights_start_within_their_bound_and_differ() -> None:
    """Uniform in `+-1/sqrt(fan_in)`; no two experts are equal; another seed gives other weights."""
    layer, other = build(0), build(1)
    assert 0.9 * D**-0.5 < layer.w1.abs().max() <= D**-0.5
    assert 0.9 * F_**-0.5 < layer.w2.abs().max() <= F_**-0.5
    assert not torch.equal(layer.w1[0], layer.w1[1])
    assert not torch.equal(layer.w1, other.w1)


def test_meta_parameters_are_left_alone() -> None:
    """A layer can be laid out without memory."""
    with torch.device("meta"):
        layer = MoELayer(D, F_, E)
    assert all(parameter.is_meta for parameter in layer.parameters())
