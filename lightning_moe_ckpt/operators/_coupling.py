"""Try a copy of an optimizer on copies of parameters: the state that it keeps, and how far the update of an element reaches.

The copy steps copies of each kind of parameter with made-up gradients. Some copies have the parameters' sizes, as far as sizes
matter to quantised and factored states. Others are tiny and step 200 times, until a large gradient would be clipped by optimizers that
clip updates. The last step is repeated with another gradient in one element, in one matrix and in one parameter, and without
one parameter's gradient, as in a replay. The most distant other bit is the coupling. At last another copy gets what a restart would
restore, and has to take the same steps. The optimizer, its parameters and all generators stay unchanged.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_ckpt.coordination import without_exchange
from lightning_moe_ckpt.errors import UnsupportedOptimizer
from lightning_moe_ckpt.operators._boxes import memory_of
from lightning_moe_ckpt.operators._copies import (
    communicates,
    copied_state,
    inner_optimizers,
    is_wrapper,
    opened,
    twin_of,
)

Coupling = Literal["element", "matrix", "parameter", "global"]
"""Range on which an element's update depends: the element and scalars, its matrix (the last two dimensions), its parameter, or all."""

Group = Mapping[str, Any]
"""Options of a parameter group."""


IDENTITY = ("params", "param_names")
_NOT_TRIED = {*IDENTITY, "lr", "initial_lr", "weight_decay"}
_LR = 1e-3
"""Learning rate of a copy whose own is zero, as at the start of a warm-up."""
_SIDE, _NUMEL = 131, 2**15
"""Limits of copied sizes: above the least sizes of factored (128) and of quantised states (4,096 elements), and prime, so that a state's
size tells what it follows."""
_STACK = 3
"""Limit of sizes in front of a matrix."""
_TINY = 4
_HIDDEN = 12
"""Steps until a copy without hidden state of the original shows other bits, and until what is done every few steps is seen."""
_LONG, _SHORT = 200, 3
"""Steps before the repeated one. 200 with small gradients bring moments to where a large one is clipped."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Coupling of an optimizer."""

    coupling: Coupling
    shown: str = ""
    """Two elements or the reason that showed it; empty if nothing was wider than an element."""


def wideness(reach: Reach) -> int:
    """Return the place of a coupling in the order from `element` to `global`."""
    return get_args(Coupling).index(reach.coupling)


class Kind(NamedTuple):
    """Parameters of equal options, type and device, and of equal size where sizes matter: an optimizer treats them alike."""

    options: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def options_of(group: Mapping[str, Any]) -> str:
    """Return a group's options in words, without rates: rates change. Classes may take other steps without any weight decay."""
    options = [(key, value) for key, value in group.items() if key not in _NOT_TRIED]
    return repr([*options, ("weight_decay", bool(group.get("weight_decay")))])


def marks_of(param: Tensor, state: Mapping[str, Any]) -> str:
    """Return in words what marks a parameter among others: flags of the user's on it, and in the state made by a constructor."""
    marks = [*vars(param).items(), *state.items()]
    return repr(sorted((str(key), value) for key, value in marks if type(value) is bool))


def shape_tried(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the size of a parameter's copy: leading dimensions shrink first, the matrix last, each to another size."""
    sizes, last = list(shape), len(shape) - 1
    for i in range(len(sizes)):
        if math.prod(sizes) > _NUMEL:
            least = _NUMEL // math.prod(sizes[:last]) - 1 if i == last else 0
            sizes[i] = min(sizes[i], max(least, (_STACK if i < last - 1 else _SIDE) + i))
    return tuple(sizes)


def _shape_tiny(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(size, _TINY - (i % 2)) for i, size in enumerate(shape))


_Form = Callable[[Tensor], Tensor | None]
_Found = TypeVar("_Found")


def _with_gradients(find: Callable[[Optimizer, _Form], _Found]) -> Callable[[Optimizer], _Found]:
    """Let a trial take gradients as the class can have them, and leave no trace."""

    @wraps(find)
    def found(optimizer: Optimizer) -> _Found:
        with _no_trace(optimizer):
            try:
                return find(optimizer, lambda gradient: gradient)
            except RuntimeError as error:
                if "dense" not in str(error):
                    raise
                return find(optimizer, lambda gradient: gradient.to_sparse(1))
            except ZeroDivisionError:
                # By the size of an empty parameter, which then cannot have gradients in training either.
                return find(optimizer, lambda gradient: gradient if gradient.numel() else None)

    return found


@_with_gradients
def first_states(optimizer: Optimizer, form: _Form) -> dict[Kind, tuple[nn.Parameter, dict[str, Any]]]:
    """Return a copied parameter of each kind, with its state after two steps; with sparse gradients if the class
    refuses others. Raises what the class raises because of copied parameters and gradients; `LookupError` if the class
    keeps state of something that is no parameter.
    """
    trial = _Trial.of(optimizer, shape_tried, number=1, every=True)
    trial.go_on(range(2), form)
    twin = trial.optimizer
    if strangers := [key for key in twin.state if not any(key is param for param in trial.params)]:
        raise LookupError(f"it keeps state of {str(strangers[0])[:40]!r}, which is no parameter")
    states = [dict(twin.state.get(param, {})) for param in trial.params]
    return dict(zip(trial.kinds, zip(trial.params, states, strict=True), strict=True))


@_with_gradients
def attributes_of(optimizer: Optimizer, form: _Form) -> tuple[str, ...]:
    """Return the attributes that another optimizer needs beside the state to take the same steps, as after a restart.
    Raises like `first_states`, and `UnsupportedOptimizer` if that optimizer takes other steps, whatever is given to it.
    """
    trial = _Trial.of(optimizer, _shape_tiny, number=2, every=True)
    made = trial.plain_attributes()
    trial.go_on(range(1), form)
    first = trial.plain_attributes()
    trial.go_on(range(1, _HIDDEN), form)
    now = trial.plain_attributes()
    changed = tuple(name for name, value in now.items() if name in first and not _same(first[name], value))
    # What the first step alone sets, such as caches, is set by the first step of a new process, unless that makes state anew.
    once = tuple(name for name in now if name not in changed and not (name in made and _same(made[name], now[name])))
    for i, names in enumerate(dict.fromkeys((changed, changed + once)), 1):
        other = _Trial.of(optimizer, _shape_tiny, number=2, every=True)
        other.take(trial, names)
        for each in (trial, other):
            each.go_on(range(i * _HIDDEN, (i + 1) * _HIDDEN), form)
        if next(_differences(trial.shown(), other.shown()), None) is None:
            return names
    raise UnsupportedOptimizer(
        f"`{type(optimizer).__qualname__}` cannot be captured: another one with the same state takes other steps, so that it keeps "
        "state that nobody can see, or tensors that share memory. Use an optimizer that keeps all of it in `state`."
    )


def _is_plain(value: object) -> bool:
    """Return whether a value is a number, text or tensor, or a list or dict of such values."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in {bool, int, float, str, Tensor}


def coupling_of(optimizer: Optimizer) -> Reach:
    """Return the widest coupling shown by copies of all kinds of parameters. Raises like `first_states`."""
    found = Reach("element")
    with _no_trace(optimizer):
        for shape, steps, later in ((_shape_tiny, _LONG, _HIDDEN), (shape_tried, _SHORT, 1)):
            trial = _Trial.of(optimizer, shape, number=2, every=False)
            for seed in range(steps):
                trial.step([gradient * 1e-3 for gradient in trial.gradients(seed)])
            for reach in trial.reaches(steps, later):
                found = max(found, reach, key=wideness)
                if found.coupling == "global":
                    return found
    return found


@contextmanager
def _no_trace(optimizer: Optimizer) -> Iterator[None]:
    """Restore generators behind the body. Devices without parameters are not asked: asking would initialise them."""
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    others = random.getstate(), np.random.get_state()  # noqa: NPY002  # the global one, which optimizers may use
    try:
        with torch.random.fork_rng(devices=sorted(each.index for each in devices if each.type == "cuda")):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])  # noqa: NPY002


class _Trial:
    """Copy of an optimizer over copied parameters, `number` of each kind, one behind the other."""

    def __init__(self, optimizer: Optimizer, params: list[nn.Parameter], kinds: list[Kind]) -> None:
        self.optimizer, self.params, self.kinds = optimizer, params, kinds

    @classmethod
    def of(
        cls, optimizer: Optimizer, shape: Callable[[Sequence[int]], tuple[int, ...]], *, number: int, every: bool
    ) -> _Trial:
        """Copy an optimizer without its state. Unless `every`, three are copied of kinds that only differ in size, and no empty ones."""
        examples: dict[Kind, Tensor] = {}
        members: list[list[tuple[Kind, Tensor]]] = []
        for group in optimizer.param_groups:
            options, kept = options_of(group), [each for each in group["params"] if every or each.numel()]
            marks = [options + marks_of(each, optimizer.state.get(each) or {}) for each in kept]
            pairs = zip(marks, kept, strict=True)
            members.append([(Kind(mark, shape(each.shape), each.dtype, each.device), each) for mark, each in pairs])
            for kind, param in members[-1]:
                examples.setdefault(kind, param)
        chosen = {kind: kind for kind in examples} if every else _ends(examples)
        numbers = torch.Generator().manual_seed(0)
        kinds = dict.fromkeys(chosen.values())
        copies = {kind: [_drawn(kind, examples[kind], numbers) for _ in range(number)] for kind in kinds}
        memo: dict[int, Any] = {}
        made: dict[str, dict[str, Any]] = {}
        for group, kept in zip(optimizer.param_groups, members, strict=True):
            own = made.setdefault(options_of(group), {"params": [], **_fields(group)})
            known = set(map(id, own["params"]))
            for kind, param in kept:
                copied = copies[chosen[kind]]
                memo[id(param)] = copied[0]
                if id(copied[0]) not in known:
                    own["params"] += copied
                    known.add(id(copied[0]))
            memo[id(group)], memo[id(group["params"])] = own, own["params"]
        memo[id(optimizer.param_groups)] = list(made.values())
        begun = {id(examples[kind]): own for kind, own in copies.items()}
        for each in (optimizer, *inner_optimizers(optimizer).values()):
            memo[id(each.state)] = _begun(each, begun)
        twin = twin_of(optimizer, memo)
        if callable(train := getattr(twin, "train", None)):
            train()  # schedule-free ones refuse to step before
        params = [param for own in copies.values() for param in own]
        return cls(twin, params, [kind for kind in copies for _ in range(number)])

    def gradients(self, seed: int) -> list[Tensor]:
        """Return gradients of all parameters, about one in size."""
        numbers = torch.Generator().manual_seed(seed)
        return [torch.randn(each.shape, generator=numbers).to(each.device, each.dtype) for each in self.params]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the copy take a step."""
        begin = [param.detach().clone() for param in self.params]

        def closure() -> Tensor:
            for param, gradient, first in zip(self.params, gradients, begin, strict=True):
                # Who moves parameters before it asks again, as sharpness-aware ones do, gets other gradients.
                moved = None if gradient is None or gradient.is_sparse else param.detach() - first
                param.grad = gradient if gradient is None or moved is None else gradient + moved
            return torch.ones(())

        closure()
        step: Any = type(self.optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # torch's wrapper calls hooks of all optimizers, which count steps
        with without_exchange(partial(communicates, self.optimizer)):
            step(self.optimizer, closure)

    def reaches(self, seed: int, later: int) -> Iterator[Reach]:
        """Yield the couplings that a repeated step with other gradients shows after as many `later` steps."""
        last: list[Tensor | None] = [*self.gradients(seed)]
        then = [last] * later  # what is in states that cannot be looked into shows then
        usual = self._after(last, *then)
        if next(_differences(usual, self._after(last, *then)), None) is not None:
            yield Reach("global", "the same step of a copy gave other bits the second time")
        for i in range(0, len(self.params), 2):
            for what, gradient in _other_gradients(last[i]):
                other = self._after([*last[:i], gradient, *last[i + 1 :]], *then)
                for j, element in _differences(usual, other):
                    yield from self._judged(what, i, j, element)

    def go_on(self, seeds: Iterable[int], form: _Form) -> None:
        """Take a step for each seed, with all generators as for any other copy."""
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  # the global one, which optimizers may use
        self._steps([form(gradient) for gradient in self.gradients(seed)] for seed in seeds)

    def plain_attributes(self) -> dict[str, Any]:
        """Return copies of the optimizer's attributes that are numbers, texts, tensors, or lists and dicts of such."""
        own = {"state", "param_groups", "defaults"}
        found = vars(self.optimizer).items()
        return {name: copy.deepcopy(value) for name, value in found if name not in own and _is_plain(value)}

    @torch.no_grad()
    def take(self, other: _Trial, names: Collection[str]) -> None:
        """Take what a restart would restore from another copy: parameters, states, options, and these attributes."""
        for param, known in zip(self.params, other.params, strict=True):
            param.copy_(known)
        inner, others = (inner_optimizers(each.optimizer).values() for each in (self, other))
        for mine, its in ((self.optimizer, other.optimizer), *zip(inner, others, strict=True)):
            for param, known in zip(self.params, other.params, strict=True):
                _load(mine.state, param, its.state.get(known) or {})
            for group, fields in zip(mine.param_groups, its.param_groups, strict=True):
                group.update({key: copied_state(value) for key, value in fields.items() if key not in IDENTITY})
        vars(self.optimizer).update({k: v for k, v in other.plain_attributes().items() if k in names})

    def _after(self, *steps: Sequence[Tensor | None]) -> list[dict[str, Any]]:
        """Return parameters, states and options of a copy of the copy after these steps from here."""
        memo: dict[int, Any] = {id(param): _marked(param.detach().clone(), param) for param in self.params}
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        memo |= {id(value): copied_state(value) for value in values if is_wrapper(value)}
        again = _Trial(twin_of(self.optimizer, memo), [memo[id(param)] for param in self.params], self.kinds)
        again._steps(steps)
        return again.shown()

    def _steps(self, steps: Iterable[Sequence[Tensor | None]]) -> None:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed devices that are not in use
        for device in {kind.device for kind in self.kinds if kind.device.type == "cuda"}:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        for gradients in steps:
            self.step(gradients)

    def shown(self) -> list[dict[str, Any]]:
        """Return all copied parameters with their states, and the options of the groups."""
        groups = [{k: v for k, v in group.items() if k not in IDENTITY} for group in self.optimizer.param_groups]
        states = [opened(self.optimizer.state.get(param, {})) for param in self.params]
        return [*({"": param, **state} for param, state in zip(self.params, states, strict=True)), {"": groups}]

    def _judged(self, what: str, i: int, j: int, element: tuple[int, ...]) -> Iterator[Reach]:
        """Judge a difference in `element` of copy `j`, `()` for all of it, where the gradient of copy `i` was another one."""
        shape = self.kinds[i].shape
        first = (0,) * len(shape)
        where = f"element {element}" if element else "what is kept of the whole parameter"
        cause = f"{what} {first}" if what == _ELEMENT else what
        if j >= len(self.params):
            yield Reach("global", f"{cause} of a parameter of shape {shape} changed options of its group")
        elif j != i:
            whose = f"of another parameter, of shape {self.kinds[j].shape}"
            yield Reach("global", f"{cause} of a parameter of shape {shape} changed {where} {whose}")
        elif math.prod(shape) > 1 and (
            (what == _ELEMENT and element != first) or (what == _MATRIX and element[:-2] != first[:-2])
        ):
            inside = what == _ELEMENT and len(element) > 1 and element[:-2] == first[:-2]
            yield Reach("matrix" if inside else "parameter", f"{cause} of a parameter of shape {shape} changed {where}")


def _load(states: Any, param: Tensor, state: Mapping[str, Any]) -> None:
    """Replace a parameter's state by another's; tensors that are there are written in place, as by a restart."""
    live, made = states.pop(param, None) or {}, {}
    for key, value in state.items():
        known = live.get(key)
        fits = type(known) is type(value) is Tensor and (known.shape, known.dtype) == (value.shape, value.dtype)
        made[key] = known.copy_(value) if fits and known is not None else copied_state(value)
    if made:
        states[param] = made


_ELEMENT, _MATRIX = "another gradient in element", "another gradient in the first matrix"


def _other_gradients(gradient: Tensor | None) -> Iterator[tuple[str, Tensor | None]]:
    assert gradient is not None
    one = gradient.clone()
    one.view(-1)[:1] += 1.0
    yield _ELEMENT, one
    if gradient.ndim > 2 and gradient.numel():  # a stack
        matrix = gradient.clone()
        matrix.view(-1, *gradient.shape[-2:])[:1] *= -3.0
        yield _MATRIX, matrix
    yield "another gradient", gradient * -10.0
    yield "no gradient", None


def _differences(usual: list[dict[str, Any]], other: list[dict[str, Any]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the copies with other bits, each with its last different element, once for each of their tensors."""
    for j, (before, after) in enumerate(zip(usual, other, strict=True)):
        shape = getattr(before[""], "shape", None)
        for key in before.keys() | after.keys():
            a, b = before.get(key), after.get(key)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape == shape and math.prod(shape) > 1:
                unlike = torch.nonzero((_bits(a) != _bits(b)).any(-1))
                if len(unlike):
                    yield j, tuple(unlike[-1].tolist())
            elif not _same(a, b):
                yield j, ()


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers, with a last dimension for the parts of one."""
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    units = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return whole.detach().contiguous().view(units[whole.element_size()]).view(*tensor.shape, -1)


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and (not a.numel() or torch.equal(_bits(a), _bits(b)))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and repr(a) == repr(b)


def _ends(kinds: Mapping[Kind, object]) -> dict[Kind, Kind]:
    """Choose three of kinds with different sizes only: the smallest, the one with the longest shortest side, and the largest.

    The largest stands for the rest. Classes choose by sides what they do with a matrix.
    """
    alike: dict[object, list[Kind]] = defaultdict(list)
    for kind in kinds:
        alike[kind.options, len(kind.shape), kind.dtype, kind.device].append(kind)
    chosen: dict[Kind, Kind] = {}
    for group in alike.values():
        ordered = sorted(group, key=lambda kind: math.prod(kind.shape))
        widest = max(ordered, key=lambda kind: min(kind.shape[-2:], default=0))
        chosen |= dict.fromkeys(ordered, ordered[-1]) | {each: each for each in (ordered[0], widest)}
    return chosen


def _drawn(kind: Kind, example: Tensor, numbers: torch.Generator) -> nn.Parameter:
    """Return a parameter of some values, with the plain attributes of the original."""
    dtype = torch.bfloat16 if kind.dtype.itemsize == 1 else kind.dtype  # torch computes with no smaller ones
    return _marked(torch.randn(kind.shape, generator=numbers).to(kind.device, dtype), example)


def _marked(values: Tensor, example: Tensor) -> nn.Parameter:
    made = nn.Parameter(values)
    vars(made).update(vars(example))
    return made


def _fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's options, with a rate."""
    fields = {key: copy.deepcopy(value) for key, value in group.items() if key not in IDENTITY}
    rate = fields.get("lr", 1.0)
    if isinstance(rate, Tensor):
        fields["lr"] = torch.where(rate == 0, torch.full_like(rate, _LR), rate)
    elif not rate:
        fields["lr"] = _LR
    return fields


def _begun(optimizer: Optimizer, copies: Mapping[int, list[nn.Parameter]]) -> defaultdict[Any, Any]:
    """Return state of copied parameters like the optimizer's state of the originals, if made of numbers and tensors of their shape.

    Some optimizers make state in their constructor, and not in their first step.
    """
    state = defaultdict[Any, Any](dict)
    for param, values in optimizer.state.items():
        tensors = [value for value in values.values() if isinstance(value, Tensor)] if values else []
        shapes = [None if is_wrapper(value) else value.shape for value in tensors] if values else [None]
        if id(param) in copies and all(shape in {param.shape, torch.Size()} for shape in shapes):
            for copied in copies[id(param)]:
                state[copied] = {
                    key: _part(value, copied.shape) if isinstance(value, Tensor) else copy.deepcopy(value)
                    for key, value in values.items()
                }
    return state


def _part(value: Tensor, shape: torch.Size) -> Tensor:
    """Return a plain copy of as much of a state; of one in shards, this rank's elements over and over, or zeros if it has none."""
    if not isinstance(value, DTensor):
        return value[tuple(map(slice, shape))].clone() if value.ndim else value.clone()
    own = memory_of(value).flatten()
    order = torch.arange(shape.numel(), device=own.device)
    return own[order % own.numel()].view(shape) if own.numel() else own.new_zeros(shape)
