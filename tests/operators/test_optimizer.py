"""The schema says beforehand what an optimizer will keep, and a slice of it replays to the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_moe_ckpt.errors import IdentityMismatch, UnsupportedOptimizer
from lightning_moe_ckpt.operators import StateSchema, groups_state, load_groups_state, register_optimizer
from lightning_moe_ckpt.operators import _optimizer_classes as classes

Make = Callable[[Any], Optimizer]

VARIANTS: dict[str, Make] = {
    "adam": lambda p: Adam(p, lr=0.1, foreach=False),
    "adam-l2": lambda p: Adam(p, lr=0.1, weight_decay=0.1, foreach=True),
    "adam-amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.1, foreach=False),
    "adamw-foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adamw-amsgrad-foreach": lambda p: AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "adamw-amsgrad-fused": lambda p: AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "adamw-maximize": lambda p: AdamW(p, lr=0.1, maximize=True),
    "adamw-tensor-lr": lambda p: AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-momentum-foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, foreach=True),
    "sgd-nesterov-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


@pytest.fixture(params=VARIANTS)
def make(request: pytest.FixtureRequest) -> Make:
    return VARIANTS[request.param]


def stacked(seed: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Five experts; rows of 63 elements end inside the vector registers of every kernel."""
    return nn.Parameter(torch.randn(5, 7, 9, generator=torch.Generator().manual_seed(seed)).to(dtype))


def step(optimizer: Optimizer, param: nn.Parameter, seed: int) -> None:
    param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_the_state_after_a_step(make: Make, dtype: torch.dtype) -> None:
    """Keys, dtypes and shapes are known before the first step."""
    param = stacked(0, dtype)
    optimizer = make([param])
    schema = StateSchema.of(optimizer)
    entries = schema.entries(param)
    assert not schema.has_state(param)
    assert all(schema.get_state(param, e.key) is None for e in entries)
    step(optimizer, param, 1)
    state = optimizer.state.get(param, {})
    assert {e.key for e in entries} == set(state)
    assert schema.has_state(param) == bool(entries)
    for entry in entries:
        live = schema.get_state(param, entry.key)
        assert live is state[entry.key]
        assert live is not None
        assert live.dtype == entry.dtype
        assert live.shape == (param.shape if entry.per_element else ())


def test_ensured_state_is_laid_out_as_the_optimizer_would(make: Make) -> None:
    """Keys in order, dtype, device and strides equal those of lazily created state."""
    live, restored = stacked(0), stacked(0)
    optimizer, other = make([live]), make([restored])
    step(optimizer, live, 1)
    schema = StateSchema.of(other)
    schema.ensure_state(restored)
    want, got = optimizer.state.get(live, {}), other.state.get(restored, {})
    assert list(got) == list(want)
    for key, value in want.items():
        assert (got[key].dtype, got[key].device, got[key].stride(), got[key].requires_grad) == (
            value.dtype,
            value.device,
            value.stride(),
            False,
        )
        assert not got[key].any()


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_the_step_count_is_on_the_device_only_if_fused(fused: bool, device: str) -> None:
    """As torch does it; shown with meta tensors, so that no GPU is needed."""
    param = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = AdamW([param], fused=fused)
    StateSchema.of(optimizer).ensure_state(param)
    assert optimizer.state[param]["step"].device.type == device
    assert optimizer.state[param]["exp_avg"].device.type == "meta"


def test_ensuring_twice_keeps_the_values(make: Make) -> None:
    """State that is there is never touched."""
    param = stacked(0)
    optimizer = make([param])
    step(optimizer, param, 1)
    before = copy.deepcopy(dict(optimizer.state.get(param, {})))
    StateSchema.of(optimizer).ensure_state(param)
    after = optimizer.state.get(param, {})
    assert set(after) == set(before)
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_dropped_state_starts_again_as_at_first(make: Make) -> None:
    """ "No state yet" is not zero state: SGD's first step copies the gradient undampened."""
    param = stacked(0)
    optimizer = make([param])
    step(optimizer, param, 1)
    first = param.detach().clone()
    with torch.no_grad():
        param.copy_(stacked(0))
    schema = StateSchema.of(optimizer)
    schema.drop_state(param)
    schema.drop_state(param)
    assert not schema.has_state(param)
    step(optimizer, param, 1)
    assert torch.equal(param, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_restored_alone_replays_to_the_same_bits(make: Make, dtype: torch.dtype) -> None:
    """Everything else in the stacked tensor may hold anything."""
    param = stacked(0, dtype)
    optimizer = make([param])
    for seed in (1, 2):
        step(optimizer, param, seed)
    row = slice(2 * 63, 3 * 63)
    schema = StateSchema.of(optimizer)
    saved = {"param": param.detach().view(-1)[row].clone()}
    for entry in schema.entries(param):
        value = schema.get_state(param, entry.key)
        assert value is not None
        saved[entry.key] = value.view(-1)[row].clone() if entry.per_element else value.clone()
    for seed in (3, 4, 5):
        step(optimizer, param, seed)

    other = stacked(9, dtype)
    reborn = make([other])
    step(reborn, other, 8)
    schema = StateSchema.of(reborn)
    with torch.no_grad():
        other.view(-1)[row].copy_(saved["param"])
        for entry in schema.entries(other):
            value = schema.get_state(other, entry.key)
            assert value is not None
            (value.view(-1)[row] if entry.per_element else value).copy_(saved[entry.key])
    for seed in (3, 4, 5):
        step(reborn, other, seed)
    assert torch.equal(other.view(-1)[row], param.view(-1)[row])
    assert not torch.equal(other, param)


def test_groups_have_their_own_options() -> None:
    """Momentum in one group only; a parameter the optimizer does not have has no entries."""
    with_momentum, without, foreign = stacked(0), stacked(1), stacked(2)
    groups: list[dict[str, Any]] = [{"params": [with_momentum], "momentum": 0.9}, {"params": [without]}]
    optimizer = SGD(groups, lr=0.1)
    schema = StateSchema.of(optimizer)
    assert [e.key for e in schema.entries(with_momentum)] == ["momentum_buffer"]
    assert schema.entries(without) == ()
    assert schema.entries(foreign) == ()
    schema.ensure_state(foreign)
    assert foreign not in optimizer.state
    optimizer.add_param_group({"params": [foreign], "momentum": 0.5})
    assert [e.key for e in schema.entries(foreign)] == ["momentum_buffer"]


def test_asking_creates_no_state() -> None:
    """`optimizer.state` is a defaultdict; a look must not leave an entry."""
    param = stacked(0)
    optimizer = AdamW([param])
    schema = StateSchema.of(optimizer)
    schema.has_state(param)
    schema.get_state(param, "exp_avg")
    schema.drop_state(param)
    assert len(optimizer.state) == 0
    with pytest.raises(KeyError):
        schema.get_state(param, "momentum_buffer")


def test_a_momentum_buffer_of_none_is_no_state() -> None:
    """Loaded state dicts may hold `None`."""
    param = stacked(0)
    optimizer = SGD([param], lr=0.1, momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = None
    schema = StateSchema.of(optimizer)
    assert not schema.has_state(param)
    assert schema.get_state(param, "momentum_buffer") is None
    schema.ensure_state(param)
    assert schema.has_state(param)


def test_a_float64_default_makes_a_float64_step() -> None:
    """As torch does it."""
    torch.set_default_dtype(torch.float64)
    try:
        param = stacked(0)
        optimizer = AdamW([param])
        entry = StateSchema.of(optimizer).entries(param)[0]
        step(optimizer, param, 1)
        assert entry.dtype == optimizer.state[param]["step"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_state_beyond_the_schema_is_refused() -> None:
    """It would be lost without a word."""
    param = stacked(0)
    optimizer = AdamW([param])
    step(optimizer, param, 1)
    schema = StateSchema.of(optimizer)
    optimizer.state[param]["ema"] = torch.zeros(1)
    with pytest.raises(UnsupportedOptimizer, match="'ema'"):
        schema.has_state(param)
    optimizer.state[param]["exp_avg"] = torch.zeros(3)
    with pytest.raises(UnsupportedOptimizer, match=r"`exp_avg` is torch\.float32"):
        schema.get_state(param, "exp_avg")


class Ends(torch.optim.RMSprop):
    """Cannot be made anew, as a class with a finaliser has to be."""

    def __init__(self, params: Any, *, secret: int) -> None:
        super().__init__(params, lr=0.1 * secret)

    def __del__(self) -> None:
        pass


class Lists(Optimizer):
    """Keeps a momentum for each parameter, by its index."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momenta = [torch.zeros_like(each) for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each, momentum in zip(self.param_groups[0]["params"], self.momenta, strict=True):
            each.sub_(momentum.mul_(0.9).add_(each.grad), alpha=0.1)


def _keep(optimizer: Optimizer, closure: Any = None) -> None:
    """Keep what no journal stores."""
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param]["made"] = object()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: AdamW([{"params": p, "differentiable": True}]), "differentiable"),
        (lambda p: SGD(p, differentiable=True), "differentiable"),
        (lambda p: AdamW(p, capturable=True), "group 0.*capturable"),
        (lambda p: torch.optim.RMSprop(p, capturable=True), "group 0.*capturable"),
        (lambda p: Ends(p, secret=1), "could not be tried.*secret"),
        (lambda p: Lists([*p, stacked(1)]), r"`Lists`.*could not.*list `momenta` has.*keep these in `state\[param\]`"),
        (type("Keeps", (torch.optim.RMSprop,), {"step": _keep}), "state.*is not a type that can be stored"),
    ],
)
def test_what_cannot_be_sliced_exactly_is_refused_with_the_reason(make: Make, reason: str) -> None:
    """At start, not at the first restore."""
    with pytest.raises(UnsupportedOptimizer, match=reason):
        StateSchema.of(make([stacked(0)]))


def test_a_partitioned_optimizer_is_refused() -> None:
    """Known by name, since importing it needs a process group."""
    sharded = type("ZeroRedundancyOptimizer", (Optimizer,), {})
    with pytest.raises(UnsupportedOptimizer, match="one rank only"):
        StateSchema.of(sharded([stacked(0)], {}))


@pytest.fixture
def own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten behind it."""
    monkeypatch.setattr(classes, "_known", dict(classes._known))


@pytest.mark.usefixtures("own_classes")
def test_a_subclass_can_be_registered() -> None:
    """If it keeps the state of its base as it is; from one whose state is found by trying there is nothing to take over."""
    sub = type("MyAdam", (AdamW,), {})
    register_optimizer(sub, like=AdamW)
    param = stacked(0)
    assert len(StateSchema.of(sub([param])).entries(param)) == 3
    other = type("Other", (AdamW,), {})
    with pytest.raises(UnsupportedOptimizer, match="not supported itself"):
        register_optimizer(other, like=torch.optim.RMSprop)
    register_optimizer(torch.optim.RMSprop, coupling="element")
    with pytest.raises(UnsupportedOptimizer, match="not supported itself"):
        register_optimizer(other, like=torch.optim.RMSprop)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "neither `like` nor `coupling`"),
        ({"dtypes": {"exp_avg": torch.float8_e4m3fn}, "coupling": "element"}, "`dtypes`, which needs `like`"),
        ({"coupling": "row"}, "'row'.*'element', 'matrix', 'parameter', 'global'"),
    ],
)
@pytest.mark.usefixtures("own_classes")
def test_a_registration_says_something(options: dict[str, Any], reason: str) -> None:
    """And nothing that would be ignored."""
    with pytest.raises(UnsupportedOptimizer, match=reason):
        register_optimizer(type("MyAdam", (AdamW,), {}), **options)


def test_the_fingerprint_changes_with_the_layout_only() -> None:
    """Learning rates are state, moments are layout."""

    def fingerprint(optimizer: Optimizer) -> str:
        return StateSchema.of(optimizer).fingerprint()

    a, b = stacked(0), stacked(1)
    assert fingerprint(AdamW([a], lr=0.1)) == fingerprint(AdamW([b], lr=0.2))
    others = [AdamW([a], amsgrad=True), Adam([a]), AdamW([a, b]), SGD([a]), SGD([a], momentum=0.9)]
    others += [AdamW([{"params": [a]}, {"params": [b]}]), AdamW([stacked(0, torch.bfloat16)])]
    prints = [fingerprint(o) for o in [AdamW([a]), *others]]
    assert len(set(prints)) == len(prints)


def test_group_fields_are_restored_exactly(make: Make) -> None:
    """Users and schedulers change them in hooks; Python floats keep every bit."""
    a, b = stacked(0), stacked(1)
    optimizer = make([{"params": [a]}, {"params": [b], "weight_decay": 0.125}])
    optimizer.param_groups[0]["initial_lr"] = 0.1 + 0.2
    state = groups_state(optimizer)
    assert all("params" not in group for group in state)
    want = copy.deepcopy(state)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 3
        group["weight_decay"] = 7.0
        if "betas" in group:
            group["betas"] = (0.5, 0.5)
    load_groups_state(optimizer, state)
    got = groups_state(optimizer)
    assert str(got) == str(want)
    assert optimizer.param_groups[0]["params"] == [a]
    assert isinstance(optimizer.param_groups[0].get("betas", ()), tuple)


def test_a_tensor_learning_rate_keeps_its_identity() -> None:
    """A captured graph or a scheduler may hold on to the tensor; the saved one must not alias it."""
    param = stacked(0)
    lr = torch.tensor(0.1)
    optimizer = AdamW([param], lr=lr, foreach=False)
    state = groups_state(optimizer)
    lr.fill_(7.0)
    load_groups_state(optimizer, state)
    assert optimizer.param_groups[0]["lr"] is lr
    assert torch.equal(lr, torch.tensor(0.1))
    saved = state[0]["lr"]
    assert isinstance(saved, Tensor)
    assert saved is not lr


def test_another_number_of_groups_is_a_mismatch() -> None:
    """The optimizer was built otherwise."""
    with pytest.raises(IdentityMismatch, match="1 parameter groups, the checkpoint 2"):
        load_groups_state(AdamW([stacked(0)]), [{}, {}])
