"""Keep operators frozen while steps are repeated: their weights compute no gradient, and take no step.

A frozen operator takes part in forward, and hands gradients on to its inputs. Freezing saves the gradient of its
weights, a third of its work. While a module runs, its frozen parameters are shadowed by other tensors, see
`FrozenView`: products with these leave the gradient out. Any other operation computes the whole gradient, which is then
dropped. Vectors cost nothing, and routers little: their gradients are computed.

Users see no difference. Parameters stay the same, `requires_grad` included, since users put hooks on parameters; a
parameter with hooks gets its gradient. A result of a weight has a graph as in training, so that a loss has one, so that
activation checkpoints and collectives in backward come on all ranks, and no user hook meets a missing gradient:
gradients that were not computed are zero.

Source: MoEvement (2026), Sec. 3.3 (frozen operators); we differ in freezing slices of stacked experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.operators import Operator, OperatorSet
from lightning_moe_ckpt.parallel import stepped_of

# Shape suffixes: E experts of a stack.

ANY_GRADIENT = "*"
"""Name of all gradients, and of tensors that are no parameter of the module."""
Omits = Literal["none", "unseen", "all"]
"""Gradients left out in replay: none (plain DDP waits for them), those at which hooks have not looked, or all."""


class Frozen:
    """The frozen operators of a module. Modules in `whole` are in compiled programs, with all gradients; for `omits`
    see `Omits`. `as_user` gives parameters the user's own `requires_grad`.
    """

    def __init__(
        self,
        module: nn.Module,
        operators: OperatorSet,
        *,
        as_user: Callable[[], None],
        whole: Collection[nn.Module] = (),
        omits: Omits = "all",
    ) -> None:
        self._as_user, self._omits = as_user, omits
        self._operators: dict[str, list[Operator]] = defaultdict(list)
        """Operators by parameter."""
        for operator in operators:
            for fqn in dict.fromkeys(piece.fqn for piece in operator.slices):
                self._operators[fqn].append(operator)
        self._params = {fqn: param for fqn, param in module.named_parameters() if fqn in self._operators}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        """Modules and names by the parameter's identity; several modules may share a parameter."""
        for owner in (each for each in module.modules() if each not in whole):
            inside = isinstance(owner, nn.MultiheadAttention)  # uses weights of a module that it does not run
            for name, param in owner.named_parameters(recurse=inside, remove_duplicate=False):
                self._owners[id(param)].append((owner, name))
        self._encoders = [each for each in module.modules() if isinstance(each, nn.TransformerEncoderLayer)]
        self._active: Collection[str] = ()
        self._passive: list[nn.Parameter] = []
        """Parameters without a step."""
        self._off: list[nn.Parameter] = []
        """Parameters among these without a gradient."""
        self._hooks: list[RemovableHandle] = []
        self.shown = dict[int, nn.Parameter]()
        """Parameters with other tensors in their place, by identity."""
        self._dropped: list[tuple[nn.Parameter, Tensor]] = []

    def freeze(self, active: Collection[str], seen: Collection[str] | None = ()) -> None:
        """Freeze all operators but `active`; hooks get gradients of `seen` parameters (`None`: of which is not known)."""
        self.thaw()
        seen = seen if seen is not None else [ANY_GRADIENT] if self._omits == "unseen" else []
        self._active, nothing = active, self._omits == "none" or ANY_GRADIENT in seen
        shown: dict[nn.Module, dict[str, tuple[nn.Parameter, Tensor | None]]] = defaultdict(dict)
        for fqn, param in self._params.items():
            first = self._operators[fqn][0]
            if not (live := [operator for operator in self._operators[fqn] if operator.name in active]):
                self._passive.append(param)
            if nothing or not param.requires_grad or fqn in seen:
                continue
            rows_E = None
            if not live and (first.kind == "expert" or param.ndim > 1):
                self._off.append(param)
            elif live and first.kind == "expert" and param.ndim > 2:
                rows_E = _rows(fqn, param, live)
                if rows_E.all():
                    continue
            else:
                continue
            for owner, name in self._owners[id(param)]:
                shown[owner][name] = param, rows_E
        self.shown = {id(param): param for tensors in shown.values() for param, _ in tensors.values()}
        hooks = {owner: _showing(owner, tensors) for owner, tensors in shown.items()}
        self._hooks += chain.from_iterable(hooks.values())
        for encoder in self._encoders:
            beneath = [hook for each in encoder.modules() for hook in hooks.get(each, ())]
            beneath.append(encoder.register_forward_pre_hook(partial(_leave_whole, beneath)))
            self._hooks.append(beneath[-1])

    def thaw(self) -> None:
        """Freeze nothing; parameters get the user's own `requires_grad` of the boundary."""
        for hook in self._hooks:
            hook.remove()
        self._passive, self._off, self._hooks, self.shown = [], [], [], {}
        self._as_user()

    @property
    def leaves_out(self) -> bool:
        """Whether gradients are left out."""
        return bool(self._off)

    def hooked(self) -> set[int]:
        """Return the keys of `shown` for parameters with a user's hook."""
        return {key for key, param in self.shown.items() if _has_hooks(param)}

    def leave_nothing_out(self) -> None:
        """Let all gradients be computed from here on; frozen parameters still take no step."""
        self._omits = "none"
        self.freeze(self._active)

    def fill_gradients(self) -> None:
        """Set gradients that were not computed to zero; call after backward."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001  # this is no hook that looks
            lacking = [param for param in map(stepped_of, self._off) if param.grad is None]
        for param in lacking:
            param.grad = torch.zeros_like(param)

    def drop_gradients(self) -> None:
        """Take frozen parameters' gradients away; call right before the optimizer steps."""
        self._dropped = [(param, param.grad) for param in map(stepped_of, self._passive) if param.grad is not None]
        for param, _ in self._dropped:
            param.grad = None

    def give_back_gradients(self) -> None:
        """Give the gradients back for later hooks; call after the optimizer stepped."""
        dropped, self._dropped = self._dropped, []
        for param, gradient in dropped:
            param.grad = gradient


def _rows(fqn: str, param: Tensor, active: Iterable[Operator]) -> Tensor:
    """Return a stack's rows with a part in active operators: bool `[E]`."""
    row = max(1, param.numel() // len(param))
    rows_E = torch.zeros(len(param), dtype=torch.bool)
    for piece in (piece for operator in active for piece in operator.slices if piece.fqn == fqn):
        rows_E[piece.start // row : -(-piece.stop // row)] = True
    return rows_E


def _showing(module: nn.Module, tensors: Mapping[str, tuple[nn.Parameter, Tensor | None]]) -> list[RemovableHandle]:
    """Shadow a module's parameters by other tensors while the module runs; return the hooks."""
    places = [(module.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2], *tensors[n]) for n in tensors]

    views = [FrozenView.of(param, active_E) for *_, param, active_E in places]

    def before(_: nn.Module, __: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for (owner, name, param, _active_E), view in zip(places, views, strict=True):
            # `functional_call` replaces parameters; user hooks wait for the gradient of all rows.
            if owner._parameters.get(name) is param and not _has_hooks(param):  # noqa: SLF001  # no public way
                owner.__dict__[name] = view  # found before registered parameters

    def after(*_: Any) -> None:
        for owner, name, *_rest in places:
            owner.__dict__.pop(name, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def _leave_whole(hooks: list[RemovableHandle], module: nn.Module, _: Any) -> None:
    """Show an encoder in evaluation as it is: torch's fast path is for modules without hooks."""
    if not module.training:
        for hook in hooks:
            hook.remove()


def _has_hooks(param: nn.Parameter) -> bool:
    """Return whether a user's hook waits for the gradient; the reducer does without left-out gradients."""
    hooks = [*(param._backward_hooks or {}).values(), *(param._post_accumulate_grad_hooks or {}).values()]  # noqa: SLF001  # no public way
    return any(not str(getattr(hook, "__module__", "")).startswith(_OWN) for hook in hooks)


_OWN = __name__.partition(".")[0] + "."


class FrozenView(Tensor):
    """A parameter or a part of one, without gradients in products, except for active rows of a stack `[E, ...]`.

    Products with a partly active stack compute gradients for runs of active rows; other rows get zeros. Functions
    other than products get the tensor itself: gradients add up in the order of training.
    """

    active_E: Tensor | None  # noqa: N815  # shape suffix
    """bool, on the CPU; `None` if nothing is active."""
    whole: Tensor
    """Tensor that this one stands for."""

    @classmethod
    def of(cls, tensor: Tensor, active_E: Tensor | None) -> Tensor:
        """Return an alias of a tensor, in its graph; the tensor itself if all rows are active."""
        if active_E is not None and active_E.all():
            return tensor
        with torch.enable_grad():
            alias = tensor.as_subclass(cls)
        alias.active_E = active_E if active_E is not None and active_E.any() else None
        alias.whole, alias._is_param = tensor, isinstance(tensor, nn.Parameter)  # noqa: SLF001  # `isinstance` asks it
        return alias

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as for a plain tensor, except for products and slices known to pay."""
        kwargs = kwargs or {}
        # Transforms of `torch.func` take no function with a backward of its own.
        plain = not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()  # noqa: SLF001  # no public way
        if func is nn.functional.multi_head_attention_forward and not plain:
            return _ATTENTION(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's own documentation has it
            if plain or func not in _PRODUCTS:
                out = func(*_plain(args), **_plain(kwargs))
                of_view = not plain and func in _PARTS and args and isinstance(args[0], cls)
                return _part(func, args, out) if of_view else out
            if func in _FOLDS and len(args) < 2:  # by names
                return func(*_plain(args), **_plain(kwargs))
            if func in _FOLDS and (out := _folded(func, *args, **kwargs)) is not None:
                return _with_graph(out)
            args, kwargs = tuple(map(_inactive, args)), {name: _inactive(each) for name, each in kwargs.items()}
            if func is torch.einsum and (pair := _pair_of(*args)) is not None:
                func, args = torch.bmm, pair
            out = _product(func, *args, **kwargs) if func in _BATCHES and len(args) > 1 else None
            return _with_graph(func(*_plain(args), **_plain(kwargs))) if out is None else out


def _plain(each: Any) -> Any:
    """Return arguments with tensors in place of views of these."""
    if isinstance(each, FrozenView):
        return each.whole
    if isinstance(each, dict):
        return {key: _plain(value) for key, value in each.items()}
    return type(each)(map(_plain, each)) if type(each) in (tuple, list) else each


def _inactive(each: Any) -> Any:
    return each.whole.detach() if isinstance(each, FrozenView) and each.active_E is None else each


def _folded(func: Any, a: Any, b: Any, bias: Any = None) -> Tensor | None:
    """Return the product of a batch and a matrix, as torch computes it if the matrix has a gradient; else `None`.

    Source: `should_fold` in torch's LinearAlgebra.cpp.
    """
    a, b = (b, a) if func is Tensor.__rmatmul__ else (a, b)
    first = isinstance(a, FrozenView)
    view, batch = (a, b) if first else (b, a)
    if not isinstance(view, FrozenView) or isinstance(batch, FrozenView) or view.active_E is not None:
        return None
    matrix = view.whole.detach()
    if matrix.ndim > 2 or batch.ndim < 3 or (bias is not None and batch.is_contiguous()):
        return None
    if bias is not None and _shares_casts(batch.device.type):
        return cast("Tensor", func(batch, view.whole, bias))
    if first or func is nn.functional.linear:
        matrix, batch = matrix.t(), batch.mT if first else batch
    out: Tensor = (batch.flatten(0, -2) @ matrix).view(*batch.shape[:-1], *matrix.shape[1:])
    if first and matrix.ndim == 2:
        return out.mT.contiguous()
    return out if bias is None else out + bias.to(out.dtype)


def _shares_casts(device: str) -> bool:
    """Return whether all uses of a parameter share one copy in autocast's type, in which their gradients add up."""
    return torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()


def _with_graph(out: Any) -> Any:
    """Give a function's results a graph, as in training."""
    if isinstance(out, tuple):
        return tuple(map(_with_graph, out))
    if not isinstance(out, Tensor) or out.requires_grad:
        return out
    # Autograd forbids changes in place of a view that a function returns.
    anchor, held = torch.zeros((), requires_grad=True), [out.clone() if out._is_view() else out]  # noqa: SLF001  # no public way
    return _Graph.apply(anchor, held)  # type: ignore[no-untyped-call]


class _Graph(torch.autograd.Function):
    """A graph that leads nowhere. Its tensor is no leaf: leaves must not be changed in place."""

    @staticmethod
    def forward(_: Any, __: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(_: Any, __: Tensor) -> tuple[None, None]:
        return None, None


def _part(func: Any, args: Sequence[Any], out: Any) -> Any:
    """Return a function's result as a view: with its rows, or plain where these are not known."""
    if isinstance(out, tuple | list):
        return tuple(_part(func, args, each) for each in out)
    stack, rows_E = args[0].whole, args[0].active_E
    if rows_E is None or not isinstance(out, Tensor):
        return FrozenView.of(out, None) if isinstance(out, Tensor) else out
    if out.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr():
        rows = _rows_in(stack, rows_E, out)
    elif func in _CHOOSE:  # by a list of numbers, or by a mask
        index, known = args[-1], args[1:-1] in ((), (0,))
        known = known and isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.int64
        rows = rows_E[index.cpu()] if known else None
    else:
        rows = rows_E if out.shape[:1] == stack.shape[:1] else None
    return out if rows is None else FrozenView.of(out, rows)


def _rows_in(stack: Tensor, active_E: Tensor, out: Tensor) -> Tensor | None:
    """Return the active rows of a stack's view; `None` if its memory is not a number of rows in order."""
    row = stack.stride(0)
    first, start = divmod(int(out.storage_offset() - stack.storage_offset()), row)
    sizes, number = [*zip(out.shape, out.stride(), strict=True)], 1
    if sizes and sizes[0][1] == row:
        number = sizes.pop(0)[0]
    fits = start + sum((size - 1) * stride for size, stride in sizes) < row and out.dtype == stack.dtype
    return active_E[first : first + number] if fits and out.numel() else None


_CHOOSE = (Tensor.__getitem__, Tensor.index_select, torch.index_select)
_PARTS: frozenset[Any] = frozenset(_CHOOSE) | {
    Tensor.T.__get__,  # type: ignore[attr-defined]  # a getter
    Tensor.mT.__get__,  # type: ignore[attr-defined]  # a getter
    *(Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.contiguous),
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, Tensor.unsqueeze, Tensor.squeeze, Tensor.expand),
    *(Tensor.unbind, torch.unbind, Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.narrow, Tensor.select),
    *(Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.type_as, torch._weight_norm),  # noqa: SLF001  # no public way
}
"""Functions whose results are rows of their argument: views, and copies row by row."""


def _pair_of(equation: str, *operands: Any) -> tuple[Tensor, Tensor] | None:
    """Return the operands of the batched product that `einsum` makes of a batch and a stack; `None` if it makes another."""
    found = _BATCHED_EINSUM.fullmatch(equation.replace(" ", ""))
    if found is None or not isinstance(operands[-1], FrozenView) or 1 in {*operands[0].shape, *operands[1].shape}:
        return None
    a, stack = operands
    whole = stack.whole.view_as(stack.whole)  # as torch has it: gradients of one product add up first
    return a.view_as(a), FrozenView.of(whole if found["c"] else whole.mT, stack.active_E)


_BATCHED_EINSUM = re.compile(r"(\w)(\w)(?!\1|\2)(\w),\1(?:\3(?P<c>\w)|(?P<d>\w)\3)->\1\2(?(c)(?P=c)|(?P=d))")


def _product(func: Any, a: Any, b: Any, offs: Tensor | None = None, *rest: Any, **kwargs: Any) -> Tensor | None:
    """Return the product of a stack and a batch, or groups, without gradients of inactive rows; `None` if it is another."""
    first, grouped, others = isinstance(a, FrozenView), func is _GROUPED, [*rest, *kwargs.values()]  # a bias, or a type
    fits = first != isinstance(b, FrozenView) and (a.ndim, b.ndim) == (_BATCHES[func], 3)
    alike = grouped if offs is not None else not grouped and len(a) == len(b)
    if not fits or not alike or any(each is not None for each in others):
        return None
    stack: Any = a if first else b
    rows, a, b, device = stack.active_E, _plain(a), _plain(b), a.device.type
    if offs is None and torch.is_autocast_enabled(device) and stack.dtype != torch.float64:
        if _shares_casts(device) and stack.whole.is_leaf:
            return None
        dtype = torch.get_autocast_dtype(device)
        a, b = a.to(dtype), b.to(dtype)
    if func in _FOLDS:
        a, b = a.view_as(a), b.view_as(b)
    return cast("Tensor", _RowsProduct.apply(a, b, offs, (rows, first)))  # type: ignore[no-untyped-call]


class _RowsProduct(torch.autograd.Function):
    """Product with a stack of matrices, as a batch or in groups that end at `offs`; active rows get gradients.

    Operands are laid out as in torch's own backward: another order of summation would give other bits.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Tensor | None, rows: tuple[Tensor, bool]) -> Tensor:
        ctx.save_for_backward(a, b, offs)
        ctx.active_E, ctx.first = rows
        return _multiply(a, b, offs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offs = ctx.saved_tensors  # once: recomputed activations are unpacked once
        found: list[Tensor | None] = [None, None]
        stack = 0 if ctx.first else 1
        if ctx.needs_input_grad[1 - stack]:
            found[1 - stack] = _multiply(a.mT, gradient, offs) if ctx.first else _multiply(gradient, b.mT, offs)
        if ctx.needs_input_grad[stack]:
            found[stack] = of_stack = torch.zeros_like(a if ctx.first else b)
            columns = offs is not None and b.stride(-2) == 1 and b.stride(-1) != 1
            for start, stop in _runs(ctx.active_E):
                rows, ends = slice(start, stop), None
                if offs is not None:
                    before = int(offs[start - 1]) if start else 0
                    rows, ends = slice(before, int(offs[stop - 1])), offs[start:stop] - before
                if ctx.first:
                    of_stack[start:stop] = _multiply(gradient[rows], b[rows].mT, ends)
                elif columns:
                    of_stack[start:stop] = _multiply(gradient[rows].mT, a[rows], ends).mT
                else:
                    of_stack[start:stop] = _multiply(a[rows].mT, gradient[rows], ends)
        return *found, None, None


def _multiply(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    return torch.bmm(a, b) if offs is None else _GROUPED(a, b, offs)


def _runs(active_E: Tensor) -> list[tuple[int, int]]:
    """Return the intervals of active rows."""
    edges = torch.diff(
        active_E.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32)
    )
    return list(zip(*((edges == sign).nonzero().flatten().tolist() for sign in (1, -1)), strict=True))


_GROUPED: Any = getattr(torch, "_grouped_mm", None)
_BATCHED = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_BATCHES: dict[Any, int] = dict.fromkeys(_BATCHED, 3) | ({} if _GROUPED is None else {_GROUPED: 2})
"""Products with stacks, and the first factor's number of dimensions."""
_FOLDS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
_ATTENTION = FunctionType(
    nn.functional.multi_head_attention_forward.__code__,
    {**vars(nn.functional), "has_torch_function": lambda _: False},
    argdefs=nn.functional.multi_head_attention_forward.__defaults__,
)
"""Torch's own function, to which our tensors are like others: its parts are called with these."""
_PRODUCTS: frozenset[Any] = frozenset(_BATCHES) | {
    *(nn.functional.linear, torch.mm, Tensor.mm, Tensor.__rmatmul__, torch.addmm, torch.baddbmm, torch.einsum),
    *(torch.mv, Tensor.mv, torch.tensordot, torch.inner, torch.addbmm, nn.functional.bilinear),
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(nn.functional.embedding, nn.functional.embedding_bag, nn.functional.multi_head_attention_forward),
}
"""Functions whose gradients are worth leaving out."""
