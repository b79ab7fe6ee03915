"""What an optimizer keeps, and how far an element's update reaches, is found by trying, and leaves no trace."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from campaign._optimizers import ByHand, Lamb
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop

from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import IdentityMismatch, UnsupportedOptimizer
from lightning_moe_ckpt.journal import decode, encode
from lightning_moe_ckpt.operators import StateSchema, register_optimizer
from lightning_moe_ckpt.operators._coupling import Coupling, _same, coupling_of, first_states, shape_tried
from lightning_moe_ckpt.operators._optimizer_classes import reach_of


class Traced(ByHand):
    """Counts its steps for all parameters, and draws a number in each."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.all = [param for group in self.param_groups for param in group["params"]]
        self.steps = {"made": 0}

    def step(self, closure: Any = None) -> Any:
        self.steps["made"] += 1
        torch.rand(1)
        return super().step()


class ClipsUpdates(ByHand):
    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        return update / update.square().mean().sqrt().clamp(min=1.0)


class ByRow(ByHand):
    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        scaled: Tensor = update / update.norm(dim=-1, keepdim=True)
        return scaled


class ClipsAll(ByHand):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class NeedsLoss(ByHand):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure()["loss"])


class Noisy(ByHand):
    """Draws for each parameter: what it draws for one depends on how many others have gradients."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        return update + 1e-3 * torch.rand_like(update)


class Uneven(ByHand):
    """Other bits at every call."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        return update * random.SystemRandom().random()


class Sharp(ByHand):
    """Asks for gradients again at weights that the norm of all gradients moves."""

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        total = torch.stack([param.grad.norm() for param in params]).norm()
        before = [param.detach().clone() for param in params]
        for param in params:
            param.data.add_(param.grad / total)
        closure()
        for param, old in zip(params, before, strict=True):
            param.data.copy_(old)
        super().step()


class Sgd(SGD):
    """Of other name only."""


def made(cls: type[Optimizer]) -> tuple[Optimizer, list[nn.Parameter]]:
    params = [nn.Parameter(torch.randn(4, 5)) for _ in range(3)]
    optimizer: Any = cls
    return optimizer([{"params": params[:2]}, {"params": params[2:], "lr": 0.0}], lr=1e-2), params


@pytest.mark.parametrize("cls", [Traced, Adam, AdamW, Sgd])
def test_what_updates_each_element_alone_is_accepted(cls: type[Optimizer]) -> None:
    """Nothing of the optimizer, of its parameters or of the global generator changes."""
    optimizer, params = made(cls)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy([params, list(optimizer.state.values())])
    random = torch.get_rng_state()
    assert coupling_of(optimizer).coupling == "element"
    assert first_states(optimizer)
    assert _same(before, [params, list(optimizer.state.values())])
    assert torch.equal(torch.get_rng_state(), random)
    assert getattr(optimizer, "steps", {"made": 1}) == {"made": 1}


@pytest.mark.parametrize("cls", [Lamb, ClipsUpdates, ByRow, ClipsAll, NeedsLoss, Noisy, Uneven, Sharp])
def test_what_does_not_is_refused_by_name(cls: type[Optimizer]) -> None:
    """Whether an element reaches its row, its tensor or all of them; and what cannot be tried at all."""
    register_optimizer(cls, like=AdamW)
    optimizer, _ = made(cls)
    StateSchema.of(optimizer)  # everything at once is right
    with pytest.raises(UnsupportedOptimizer, match=f"{cls.__name__}.*Use `DenseCheckpoint`"):
        StateSchema.of(optimizer, in_parts=True)


class Marked(Traced):
    """Scales the update of one tensor by its norm: with weight decay, with a flag, with long sides, or every seventh step."""

    def __init__(self, params: Any, by: str) -> None:
        self.by = by
        super().__init__(params)

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        decayed = [each for group in self.param_groups if group["weight_decay"] for each in group["params"]]
        chosen = {
            "decay": any(param is each for each in decayed),
            "flag": getattr(param, "flag", False),
            "sides": min(param.shape) >= 8,
            "period": self.steps["made"] % 7 == 0,
        }
        return update / update.norm() if chosen[self.by] else update


@pytest.mark.parametrize("by", ["decay", "flag", "sides", "period"])
def test_one_unlike_the_others_is_tried_too(by: str) -> None:
    """Whatever the class chooses it by, and wherever it stands among others of the same shape."""
    params = [nn.Parameter(torch.randn(shape)) for shape in [(3, 4), (9, 9), (3, 4), (3, 90)]]
    params[2].flag = True  # type: ignore[attr-defined]
    decay = 0.1 if by == "decay" else 0.0
    groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:], "weight_decay": decay}]
    optimizer = Marked(groups, by)
    assert coupling_of(optimizer).coupling == "matrix"


class Flagged(Traced):
    """Makes all state anew in a process's first step, as an attribute says, and counts every fourth step."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.begun, self.fourths = False, 0

    def step(self, closure: Any = None) -> Any:
        if not self.begun:
            self.state.clear()
            self.begun = True
        super().step()
        self.fourths += self.steps["made"] % 4 == 0


class Shared(Flagged):
    """Keeps one step count for all parameters."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        count = self.state[param].setdefault("count", self.state[self.all[0]].setdefault("count", torch.zeros(())))
        count += 1
        counted: Tensor = update / count
        return counted


class Elsewhere(Flagged):
    """Keeps numbers in an object that no restart makes again."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.held = deque([1.0], maxlen=4)

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        self.held.append(self.held[-1] + 0.1)
        return update * sum(self.held)


def test_a_restart_is_tried_with_all_that_is_stored() -> None:
    """Attributes that it needs are stored, and what it cannot have again is refused."""
    optimizer, params = made(Flagged)
    rest = StateSchema.of(optimizer).rest(dict(zip("abcdefgh", params, strict=False)))
    assert {"steps", "fourths", "begun"} <= set(rest["attributes"])
    for cls in (Shared, Elsewhere):
        with pytest.raises(UnsupportedOptimizer, match=f"{cls.__name__}.*another one with the same state takes other"):
            StateSchema.of(made(cls)[0])


@pytest.mark.parametrize(("cls", "declared"), [(ByHand, "matrix"), (Lamb, "parameter"), (Noisy, "global")])
def test_what_is_declared_holds_if_copies_show_no_more(cls: type[Optimizer], declared: Coupling) -> None:
    """Also where it is wider than what they show: a wider cut is always right."""
    other = type(cls.__name__, (cls,), {})
    register_optimizer(other, coupling=declared)
    optimizer, params = made(other)
    assert reach_of(optimizer).coupling == declared
    assert [entry.key for entry in StateSchema.of(optimizer).entries(params[0])] == ["mean", "var"]


@pytest.mark.parametrize(("cls", "declared"), [(Lamb, "element"), (Lamb, "matrix"), (Sharp, "parameter")])
def test_copies_refute_what_is_declared(cls: type[Optimizer], declared: Coupling) -> None:
    """With two elements that showed it."""
    other: Any = type(cls.__name__, (cls,), {})
    register_optimizer(other, like=AdamW, coupling=declared)
    with pytest.raises(
        UnsupportedOptimizer, match=f"{declared}.*another gradient in element.*changed.*Use `DenseCheck"
    ):
        reach_of(other([nn.Parameter(torch.randn(shape)) for shape in [(3, 4, 5), (6, 5)]]))


def test_groups_need_not_have_the_options_of_torch() -> None:
    """`fused`, `amsgrad` and the like are off where nobody has heard of them."""
    register_optimizer(ByHand, like=AdamW)
    optimizer, params = made(ByHand)
    schema = StateSchema.of(optimizer)
    assert [entry.key for entry in schema.entries(params[0])] == ["step", "exp_avg", "exp_avg_sq"]
    assert schema.adam_group(params[0]) is None
    assert schema.fingerprint()


@pytest.mark.parametrize(
    ("make", "coupling"),
    [
        *((make, "element") for make in (RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad)),
        *(
            (make, "element")
            for make in (torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Rprop)
        ),
        (torch.optim.Muon, "matrix"),
        (torch.optim.Adafactor, "parameter"),
        (Lamb, "parameter"),
        (Sharp, "global"),
        (torch.optim.LBFGS, "global"),
    ],
)
def test_the_coupling_of_a_class_is_found(make: Callable[..., Optimizer], coupling: Coupling) -> None:
    """As far as copies of stacks, matrices and vectors show it."""
    shapes = [(6, 5)] * 2 if make is torch.optim.Muon else [(3, 4, 5), (6, 5), (7,), (1,), ()]
    reach = coupling_of(make([nn.Parameter(torch.randn(shape)) for shape in shapes]))
    assert reach.coupling == coupling
    assert bool(reach.shown) == (coupling != "element")


def test_thousands_of_experts_are_as_soon_tried_as_a_few() -> None:
    """Kinds of parameters count, and copies are small."""
    params = [nn.Parameter(torch.zeros(2, 3)) for _ in range(4096)]
    trials = first_states(RMSprop(params))
    assert len(trials) == 1
    assert [shape_tried(shape) for shape in [(4096, 1024, 4096), (50_000, 768), (33,)]] == [
        (3, 132, 133),
        (131, 249),
        (33,),
    ]


def test_numbers_none_and_whole_tensors_come_back_as_they_were() -> None:
    """In records or beside them: in the order of the optimizer's own keys, and nothing else stays."""

    class Odd(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    state.update(calls=state.get("calls", 0) + 1, best=None, mean=param.clone(), rows=param.sum(-1))

    params = {name: nn.Parameter(torch.randn(3, 4)) for name in "ab"}
    optimizer = Odd(params.values(), lr=0.1)
    schema = StateSchema.of(optimizer)
    assert [entry.key for entry in schema.entries(params["a"])] == ["mean", "rows"]
    optimizer.step()
    rest = schema.rest(params)
    kept = {name: dict(optimizer.state[param]) for name, param in params.items()}
    optimizer.step()
    optimizer.state[params["a"]]["new"] = 1
    for name, param in params.items():  # as from records
        optimizer.state[param].update(mean=kept[name]["mean"], rows=kept[name]["rows"])
    schema.load_rest(rest, params)
    for name, param in params.items():
        state = optimizer.state[param]
        assert list(state) == ["calls", "best", "mean", "rows"]
        assert (state["calls"], state["best"]) == (1, None)
        assert torch.equal(state["rows"], kept[name]["rows"])


@pytest.mark.parametrize("shape", [(3, 4), (700, 300), (9, 200, 300), (4_000,)])
def test_state_of_the_whole_has_the_size_that_a_small_copy_foretells(shape: tuple[int, ...]) -> None:
    """Rows, columns, and blocks of elements; a map is as large for every parameter."""

    class Blocks(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                scales, levels = torch.zeros(-(-param.numel() // 256)), torch.zeros(100)
                self.state[param].update(scales=scales, levels=levels, grid=torch.zeros(len(param), len(param)))

    for make in (Adafactor, Blocks):
        param = nn.Parameter(torch.zeros(shape))
        optimizer: Optimizer = make([param], lr=0.1)
        foretold = {each.key: (each.per_element, each.shape) for each in StateSchema.of(optimizer).entries(param)}
        param.grad = torch.ones_like(param)
        optimizer.step()
        kept = optimizer.state[param]
        assert foretold == {
            key: (True, ()) if each.shape == param.shape else (False, tuple(each.shape)) for key, each in kept.items()
        }


def test_empty_parameters_are_no_hindrance() -> None:
    """Adafactor divides by a tensor's size; experts that are not there have none."""
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.empty(0, 4))]
    schema = StateSchema.of(Adafactor(params), in_parts=True)
    assert schema.reach.coupling == "parameter"
    assert [len(schema.entries(param)) for param in params] == [3, 0]


def test_transposed_tensors_come_back_transposed() -> None:
    """Products with them round differently; in lists and dicts as well."""

    class Inverts(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                inverse = torch.eye(3).mul(2.0).T.contiguous().T + torch.ones(3, 3).T
                turned = torch.randn(3, 5).T
                self.state[param].update(turned=turned, both=[inverse, {"in": (turned, 1)}])

    param = nn.Parameter(torch.randn(3, 3))
    optimizer = Inverts([param], lr=0.1)
    schema = StateSchema.of(optimizer)
    optimizer.step()
    kept = dict(optimizer.state[param])
    rest = decode(encode(schema.rest({"a": param})))
    schema.drop_state(param)
    schema.load_rest(rest, {"a": param})
    found = optimizer.state[param]
    for before, after in [(kept["turned"], found["turned"]), (kept["both"][1]["in"][0], found["both"][1]["in"][0])]:
        assert before.stride() == after.stride() == (1, 5)
        assert torch.equal(before, after)


def test_weights_for_validation_are_not_for_replays() -> None:
    """Their state may be missing in a repeated step; a policy that takes everything at once repeats none without it."""
    switching = type("Switching", (RMSprop,), {"eval": lambda _: None, "train": lambda _: None})
    optimizer = switching([nn.Parameter(torch.zeros(3))])
    StateSchema.of(optimizer)
    StateSchema.of(optimizer, in_parts=True, mixed=True)
    with pytest.raises(UnsupportedOptimizer, match=r"Switching.eval.*Use `DenseCheckpoint`"):
        StateSchema.of(optimizer, in_parts=True)


class Registered(ByHand):
    """Keeps a number elsewhere, which it frees when it goes; `hides` says whether its steps change the number."""

    elsewhere: ClassVar[dict[int, float]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count()
    hides = False

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.number = next(self.numbers)
        self.elsewhere[self.number] = 1.0

    def __del__(self) -> None:
        del self.elsewhere[self.number]

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        if self.hides:
            self.elsewhere[self.number] *= 0.9
        return update * self.elsewhere[self.number]


def test_a_class_with_a_finaliser_is_made_anew() -> None:
    """Nothing of the original is freed with a copy; what only the original has cannot be restored."""
    optimizer, params = made(Registered)
    StateSchema.of(optimizer, in_parts=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    hiding, _ = made(type("Hiding", (Registered,), {"hides": True}))
    with pytest.raises(UnsupportedOptimizer, match=r"Hiding.*keeps state that nobody can see"):
        StateSchema.of(hiding)


class Pair(Tensor):
    """Tensor of two others, of which torch knows no more."""

    high: Tensor
    low: Tensor

    @classmethod
    def of(cls, high: Tensor, low: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype)
        made.high, made.low = high, low
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        return Pair.of(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def test_tensors_of_tensors_are_put_together_again() -> None:
    """As a class that a copy has kept; a file cannot name another one."""

    class Paired(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["pair"] = Pair.of(param.clone(), param.sum(0))

    params = {"a": nn.Parameter(torch.randn(3, 4))}
    optimizer = Paired(params.values(), lr=0.1)
    schema = StateSchema.of(optimizer)
    optimizer.step()
    rest = decode(encode(schema.rest(params)))
    low, recorded = optimizer.state[params["a"]]["pair"].low.clone(), schema.entries(params["a"])
    kept = [value.clone() for each in recorded if (value := schema.get_state(params["a"], each.key)) is not None]
    assert {each.key for each in recorded} == {"pair:high", "pair:low"}
    schema.drop_state(params["a"])
    schema.ensure_state(params["a"])
    for each, value in zip(recorded, kept, strict=True):
        live = schema.get_state(params["a"], each.key)
        assert live is not None
        live.copy_(value)
    schema.load_rest(rest, params)
    assert type(optimizer.state[params["a"]]["pair"]) is Pair
    assert torch.equal(optimizer.state[params["a"]]["pair"].low, low)
    assert {"high", "low"} <= {key.partition(":")[2] for key in rest["state"][0]["names"]["keys"]}
    rest["state"][0]["names"]["wrapped"]["pair"][0] = "pathlib.Path"
    with pytest.raises(IdentityMismatch, match=r"pathlib.Path"):
        schema.load_rest(rest, params)


def test_numbers_of_thousands_of_experts_are_columns() -> None:
    """Their names and keys are written once; what changes is found."""
    params = {str(i): nn.Parameter(torch.randn(2, 3)) for i in range(100)}

    class Counts(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for param in params.values():
                if param.grad is not None:
                    state = self.state[param]
                    state.update(mean=param.clone(), calls=state.get("calls", 0) + 1)

    optimizer = Counts(params.values(), lr=0.1)
    schema = StateSchema.of(optimizer)
    for calls, seen in ((1, 50), (2, 50), (3, 100)):
        for param in list(params.values())[:seen]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        rest = decode(encode(schema.rest(params)))
        kept = {name: optimizer.state[param]["calls"] for name, param in params.items() if param in optimizer.state}
        assert max(kept.values()) == calls
        assert len(kept) == seen
        optimizer.state[params["0"]]["calls"] = 7
        schema.load_rest(rest, params)
        assert {name: optimizer.state[params[name]]["calls"] for name in kept} == kept
        assert [type(optimizer.state[params[name]]["calls"]) for name in kept] == [int] * seen


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about this tiny run
@pytest.mark.parametrize(("cls", "said"), [(Adafactor, True), (AdamW, False)])
def test_a_run_says_what_its_parts_follow(
    cls: type[Optimizer], said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is wider than an element; markers of other runs stay as they were."""
    module = tiny.ToZero(nn.Linear(4, 3), nn.Linear(3, 1), optimizer=cls)
    tiny.fit(module, tiny.rows(torch.ones(8, 4), 2), SparseCheckpoint(tmp_path / "run", window=2), max_steps=4)
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert ("coupling=parameter" in capsys.readouterr().out) == said
