"""Optimizers of the campaign beside Adam, AdamW and SGD: all of torch, those of packages that are installed, and a few by hand."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe_ckpt.testing import Seam

Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]


class ByHand(Optimizer):
    """AdamW with a Python number for its steps, a `None`, and a count of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})
        self.made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.made += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state |= {
                            "best": None,
                            "mean": torch.zeros_like(param),
                            "steps": 0,
                            "var": torch.zeros_like(param),
                        }
                    state["steps"] += 1
                    state["mean"].lerp_(param.grad, 1 - beta1)
                    state["var"].lerp_(param.grad.square(), 1 - beta2)
                    unbiased = state["var"] / (1 - beta2 ** state["steps"])
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(self.scaled(param, state["mean"] / (unbiased.sqrt() + 1e-8)), alpha=-group["lr"])
        return loss

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        return update


class Registered(ByHand):
    """Keeps numbers elsewhere, which it frees when it goes, as optimizers of native code do."""

    elsewhere: ClassVar[dict[int, float]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.number = next(self.numbers)
        self.elsewhere[self.number] = 0.5

    def __del__(self) -> None:
        if type(self) is Registered:  # and not Lightning's wrapper, whose class derives from this one
            del self.elsewhere[self.number]

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        return update * self.elsewhere[self.number]


class Lamb(ByHand):
    """Each tensor's update by the tensor's norm."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        scaled: Tensor = update * (param.norm() / (update.norm() + 1e-6)).clamp(max=10.0)
        return scaled


class PerMatrix(ByHand):
    """Each matrix of a stack scaled by its own norm, as Muon orthogonalises single ones; vectors as they are."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        return update if param.ndim < 2 else update / (torch.linalg.matrix_norm(update, keepdim=True) + 1e-6)


class RowByRow(ByHand):
    """Factors as Adafactor does, in statistics of the rows and columns of each matrix, without a norm of the whole tensor."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        if param.ndim < 2:
            return update
        state = self.state[param]
        if "rows" not in state:
            state |= {"rows": torch.zeros_like(param[..., :1]), "columns": torch.zeros_like(param[..., :1, :])}
        state["rows"].lerp_(update.square().mean(-1, keepdim=True), 0.5)
        state["columns"].lerp_(update.square().mean(-2, keepdim=True), 0.5)
        scaled: Tensor = update / (state["rows"].sqrt() * state["columns"].sqrt() + 1e-3)
        return scaled


class Heavy(ByHand):
    """Keeps far more of one vector than its elements: 2 MiB."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        if param is self.param_groups[0]["params"][-1]:
            self.state[param].setdefault("map", torch.zeros(2, 2**18))[0, 0] += 1
        return update


class Blocks(Tensor):
    """Tensor of 8 bits an element and a scale for each 16 elements."""

    codes: Tensor
    scale: Tensor
    title: str

    @classmethod
    def made(cls, codes: Tensor, scale: Tensor, title: str) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.title = codes, scale, title
        return made

    def __tensor_flatten__(self) -> tuple[list[str], list[str]]:
        return ["codes", "scale"], [self.title]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: list[str], size: Any, stride: Any) -> Any:
        assert (size, stride) == (inner["codes"].shape, inner["codes"].stride())
        return Blocks.made(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of {args[0].title}")

    @classmethod
    def of(cls, value: Tensor, title: str) -> Any:
        flat = value.reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 16)).view(-1, 16)
        scale = blocks.abs().amax(-1).clamp(min=1e-12) / 127
        codes = (blocks / scale[:, None]).round().to(torch.int8).view(-1)[: len(flat)].view(value.shape)
        return cls.made(codes, scale, title)

    def value(self) -> Tensor:
        flat = self.codes.reshape(-1).float()
        return (flat * self.scale.repeat_interleave(16)[: len(flat)]).view(self.codes.shape)


class Quantised(Optimizer):
    """Momentum in tensors made of others, except that of vectors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    old = state.get("mean")
                    mean = (old.value() if isinstance(old, Blocks) else old if state else 0) * 0.9 + param.grad
                    state["mean"] = Blocks.of(mean, "mean") if param.ndim > 1 else mean
                    param.sub_(mean, alpha=group["lr"])
        return loss


class Modes(ByHand):
    """Trains at weights between its slow ones and their average, and gives validation the average, as schedule-free ones do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["training"] = True

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        slow = self.state[param].setdefault("slow", param.clone())
        slow.sub_(update, alpha=1e-3)
        return update

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["training"] is not mode else ():
                if param in self.state:
                    slow = self.state[param]["slow"]
                    param.copy_((param - 0.1 * slow) / 0.9 if mode else param.lerp(slow, 0.1))
            group["training"] = mode

    def eval(self) -> None:
        self.train(False)


class Sharp(Optimizer):
    """Asks for gradients a second time, at weights that the norm of all gradients moves, and leaves the step to another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        asked = torch.enable_grad()(closure)
        loss = asked()
        moved = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in moved]).norm() + 1e-12
        for param in moved:
            self.state[param]["old"] = param.clone()
            param.add_(param.grad / norm, alpha=0.05)
        asked()
        for param in moved:
            param.copy_(self.state[param]["old"])
        self.inner.step()
        return loss


class LookingAhead(Optimizer):
    """Moves slow weights, made with it, every second step of another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups, self.steps = inner.param_groups, 0
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for param, state in self.state.items():
                param.copy_(state["slow"].lerp_(param, 0.5))
        return loss


def _flat(make: Callable[..., Optimizer], **options: Any) -> Make:
    """Of one group: some classes take no more."""
    return lambda groups: make([param for group in groups for param in group["params"]], **options)


def _of(make: Callable[..., Optimizer], **options: Any) -> Make:
    return lambda groups: make(groups, **options)


def _heavy(groups: Groups) -> Optimizer:
    """Where files have next to no room beyond what their model explains."""
    Seam(module="lightning_moe_ckpt.recovery._loading", attribute="_ROOM_NBYTES", replacement=2**16).apply()
    return Heavy(groups, lr=1e-3)


def _muon(groups: Groups) -> Optimizer:
    """Of matrices alone, the only ones that it takes; the rest does not train."""
    return torch.optim.Muon(
        [{**group, "params": [p for p in group["params"] if p.ndim == 2]} for group in groups][:1], lr=0.01
    )


optim = torch.optim
ELEMENT: dict[str, Make] = {
    "rmsprop": _of(optim.RMSprop, lr=1e-3, centered=True, momentum=0.9),
    "rmsprop_foreach": _of(optim.RMSprop, lr=1e-3, foreach=True),
    "nadam": _of(optim.NAdam, lr=1e-3),
    "radam": _of(optim.RAdam, lr=1e-3, decoupled_weight_decay=True),
    "adagrad": _of(optim.Adagrad, lr=1e-2),
    "adagrad_fused": _of(optim.Adagrad, lr=1e-2, fused=True),
    "adadelta": _of(optim.Adadelta, maximize=True),
    "adamax": _of(optim.Adamax, lr=1e-3),
    "asgd": _of(optim.ASGD, lr=1e-2),
    "rprop": _of(optim.Rprop, lr=1e-3),
    "by_hand": _of(ByHand, lr=1e-3),
    "registered": _of(Registered, lr=1e-3),
}
"""Each element alone: of every policy whose parts are of one state."""
TABLELESS = ("rmsprop", "rmsprop_foreach", "nadam", "radam", "adagrad", "adadelta", "adamax", "asgd", "rprop")
"""Classes of torch that every policy takes."""
MATRIX: dict[str, Make] = {"muon": _muon, "per_matrix": _of(PerMatrix, lr=1e-3)}
"""Each matrix alone."""
PARAMETER: dict[str, Make] = {
    "adafactor": _of(optim.Adafactor, lr=1e-2),
    "lamb": _of(Lamb, lr=1e-2),
    "quantised": _of(Quantised, lr=1e-2),
    "row_by_row": _of(RowByRow, lr=1e-3),
}
"""Each parameter alone, or with statistics that are stored whole."""
GLOBAL: dict[str, Make] = {
    "lbfgs": _flat(optim.LBFGS, lr=0.1, max_iter=3, history_size=4),
    "heavy": _heavy,
    "modes": _of(Modes, lr=1e-3),
    "sharp": _of(Sharp, lr=0.05),
    "looking_ahead": lambda groups: LookingAhead(optim.AdamW(groups, lr=1e-2)),
}
"""For policies that take everything at once, as is what gives validation other weights."""


def _packaged(package: str, name: str, **options: Any) -> Make:
    return lambda groups: getattr(import_module(package), name)(groups, **options)


for package, coupled, more in (
    ("lion_pytorch", ELEMENT, {"lion": _packaged("lion_pytorch", "Lion", lr=1e-3)}),
    ("pytorch_optimizer", ELEMENT, {"adan": _packaged("pytorch_optimizer", "Adan", lr=1e-3)}),
    ("pytorch_optimizer", PARAMETER, {"shampoo": _packaged("pytorch_optimizer", "Shampoo", lr=1e-3)}),
    ("pytorch_optimizer", PARAMETER, {"soap": _packaged("pytorch_optimizer", "SOAP", lr=1e-3)}),
    ("bitsandbytes", ELEMENT, {"bnb_adamw": _packaged("bitsandbytes.optim", "AdamW", lr=1e-3)}),
    (
        "bitsandbytes",
        PARAMETER,
        {"adamw_8bit": _packaged("bitsandbytes.optim", "AdamW8bit", lr=1e-3, min_8bit_size=64)},
    ),
    ("transformers", PARAMETER, {"hf_adafactor": _packaged("transformers", "Adafactor", lr=1e-2, relative_step=False)}),
    (
        "schedulefree",
        GLOBAL,
        {"schedule_free": _packaged("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=3)},
    ),
    ("prodigyopt", GLOBAL, {"prodigy": _packaged("prodigyopt", "Prodigy")}),
):
    coupled |= more if find_spec(package) else {}


def _compiled(name: str) -> Make:
    """Of a package that compiles its step, which torch warns about."""

    def make(groups: Groups) -> Optimizer:
        warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching|`torch.jit.script")
        return _packaged("torchao.optim", name, lr=1e-3)(groups)

    return make


BLOCKS: dict[str, Make] = {"quantised": PARAMETER["quantised"]}
BLOCKS |= {name: _compiled(name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8") if find_spec("torchao")}
"""Of large parameters, state in tensors made of others."""
OTHERS = {**ELEMENT, **MATRIX, **PARAMETER, **GLOBAL}
"""All of them, by name in `Setup.optimizer`."""


def make_other(name: str, groups: Groups) -> Optimizer:
    """Return the optimizer called so, ready to train."""
    optimizer = {**OTHERS, **BLOCKS}[name](groups)
    train: Any = getattr(optimizer, "train", None)
    if train is not None:  # schedule-free ones do not begin in this mode
        train()
    return optimizer
