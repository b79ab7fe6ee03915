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

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.operators import Operator, OperatorSet
from lightning_moe_ckpt.parallel import stepped_of

# Shape suffixes: E experts of a stack.


class Frozen:
    """The frozen operators of a module.

    Args:
        module: holds the parameters.
        operators: operators of the module.
        may_skip: whether gradients may be left out at all (not under plain DDP, nor in compiled programs).
        as_user: gives parameters the user's own `requires_grad`.
    """

    def __init__(
        self, module: nn.Module, operators: OperatorSet, *, may_skip: bool, as_user: Callable[[], None]
    ) -> None:
        self._module, self._may_skip, self._as_user = module, may_skip, as_user
        self._operators: dict[str, list[Operator]] = defaultdict(list)
        """Operators by parameter."""
        for operator in operators:
            for fqn in dict.fromkeys(piece.fqn for piece in operator.slices):
                self._operators[fqn].append(operator)
        self._params = {fqn: param for fqn, param in module.named_parameters() if fqn in self._operators}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        """Modules and names by the parameter's identity; several modules may share a parameter."""
        for owner in module.modules():
            for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
                self._owners[id(param)].append((owner, name))
        self._active: Collection[str] = ()
        self._passive: list[nn.Parameter] = []
        """Parameters without a step."""
        self._off: list[nn.Parameter] = []
        """Parameters among these without a gradient."""
        self._hooks: list[RemovableHandle] = []
        self._dropped: list[tuple[nn.Parameter, Tensor]] = []

    def freeze(self, active: Collection[str]) -> None:
        """Freeze all operators but `active`; a parameter with an active part still takes its steps."""
        self.thaw()
        self._active = active
        shown: dict[nn.Module, dict[str, tuple[nn.Parameter, Tensor | None]]] = defaultdict(dict)
        for fqn, param in self._params.items():
            first = self._operators[fqn][0]
            live = [operator for operator in self._operators[fqn] if operator.name in active]
            if not live:
                self._passive.append(param)
            if not self._may_skip or not param.requires_grad:
                continue
            rows_E = None
            if not live and (first.kind == "expert" or (first.kind == "dense" and param.ndim > 1)):
                self._off.append(param)
            elif live and first.kind == "expert" and param.ndim > 2:
                rows_E = _rows(fqn, param, live)
                if rows_E.all():
                    continue
            else:
                continue
            for owner, name in self._owners[id(param)]:
                shown[owner][name] = param, rows_E
        for owner, tensors in shown.items():
            self._hooks += _showing(owner, tensors)

    def thaw(self) -> None:
        """Freeze nothing; parameters get the user's own `requires_grad` of the boundary."""
        for hook in self._hooks:
            hook.remove()
        self._passive, self._off, self._hooks = [], [], []
        self._as_user()

    @property
    def leaves_out(self) -> bool:
        """Whether gradients are left out."""
        return bool(self._off)

    def leave_nothing_out(self) -> None:
        """Let all gradients be computed from here on; frozen parameters still take no step."""
        self._may_skip = False
        self.freeze(self._active)

    def fill_gradients(self) -> None:
        """Set gradients that were not computed to zero; call after backward."""
        for param in map(stepped_of, self._off):
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def drop_gradients(self) -> None:
        """Take frozen parameters' gradients away; call right before the optimizer steps."""
        passive = map(stepped_of, self._passive)
        self._dropped = [(param, param.grad) for param in passive if param.grad is not None]
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

    def before(_: nn.Module, __: Any) -> None:
        for name, (param, active_E) in tensors.items():
            # `functional_call` replaces parameters; user hooks wait for the gradient of all rows.
            if module._parameters.get(name) is param and not _has_hooks(param):  # noqa: SLF001  # no public way
                module.__dict__[name] = FrozenView.of(param, active_E)  # found before registered parameters

    def after(*_: Any) -> None:
        for name in tensors:
            module.__dict__.pop(name, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def _has_hooks(param: nn.Parameter) -> bool:
    """Return whether a user's hook waits for the gradient; the reducer does without left-out gradients."""
    hooks = [*(param._backward_hooks or {}).values(), *(param._post_accumulate_grad_hooks or {}).values()]  # noqa: SLF001  # no public way
    return any(not str(getattr(hook, "__module__", "")).startswith(_OWN) for hook in hooks)


_OWN = __name__.partition(".")[0] + "."


class FrozenView(Tensor):
    """A parameter or a part of one, without gradients in products, except for active rows of a stack `[E, ...]`.

    Products with a partly active stack compute gradients for runs of active rows; other rows get zeros.
    """

    active_E: Tensor | None  # noqa: N815  # shape suffix
    """bool, on the CPU; `None` if nothing is active."""

    @classmethod
    def of(cls, tensor: Tensor, active_E: Tensor | None) -> FrozenView:
        """Return an alias of a tensor, in its graph."""
        alias = tensor.as_subclass(cls)
        alias.active_E = active_E if active_E is not None and active_E.any() else None
        return alias

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as for a plain tensor, except for products and slices known to pay."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # as torch's own documentation has it
            # Transforms of `torch.func` take no function with a backward of its own.
            if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():  # noqa: SLF001  # no public way
                return func(*args, **kwargs)
            first = args[0] if args else None
            if isinstance(first, cls):
                if first.active_E is None and func in _PARTS:
                    return _all_frozen(func(*args, **kwargs))
                if first.active_E is not None and func in _SLICES and not kwargs:
                    return _SLICES[func](first, func(*args), *args[1:])
            if func not in _PRODUCTS:
                return func(*args, **kwargs)
            if func in _BATCHES and len(args) > 1 and isinstance(args[1], cls) and args[1].active_E is not None:
                return _product(func, *args, **kwargs)
            return _with_graph(func(*map(_inactive, args), **{name: _inactive(each) for name, each in kwargs.items()}))


def _inactive(each: Any) -> Any:
    return each.detach() if isinstance(each, FrozenView) and each.active_E is None else each


def _all_frozen(out: Any) -> Any:
    if isinstance(out, Tensor):
        return FrozenView.of(out, None)
    return tuple(map(_all_frozen, out)) if isinstance(out, tuple | list) else out


def _with_graph(out: Any) -> Any:
    """Give a product's result a graph, as in training."""
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


def _item(stack: FrozenView, out: Tensor, index: Any) -> Tensor:
    assert stack.active_E is not None
    number = type(index) is int or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool)
    return FrozenView.of(out, None) if number and not stack.active_E[int(index)] else out


def _unbound(stack: FrozenView, out: tuple[Tensor, ...], dim: int = 0) -> tuple[Tensor, ...]:
    assert stack.active_E is not None
    if dim != 0:
        return out
    rows = zip(out, stack.active_E.tolist(), strict=True)
    return tuple(each if active else FrozenView.of(each, None) for each, active in rows)


def _transposed(stack: FrozenView, out: Tensor, *dims: int) -> Tensor:
    same = 0 not in dims and -stack.ndim not in dims
    return FrozenView.of(out, stack.active_E) if same and stack.ndim == 3 else out


_SLICES: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _item,
    Tensor.unbind: _unbound,
    torch.unbind: _unbound,
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    Tensor.mT.__get__: _transposed,  # type: ignore[attr-defined]  # a getter
}
_PARTS: frozenset[Any] = frozenset(_SLICES) | {
    Tensor.T.__get__,  # type: ignore[attr-defined]  # a getter
    *(Tensor.t, torch.t, Tensor.view, Tensor.reshape, Tensor.permute, Tensor.flatten, Tensor.unsqueeze, Tensor.squeeze),
    *(Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.contiguous, Tensor.expand),
    *(Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.type_as),
}
"""Functions whose results are frozen if their argument is wholly frozen."""


def _product(func: Any, x: Tensor, stack: FrozenView, offs: Tensor | None = None, *rest: Any, **kwargs: Any) -> Any:
    w, device = stack.as_subclass(Tensor), x.device.type
    others = [*rest, *kwargs.values()]  # a bias, or the output's type
    if (
        any(each is not None for each in others)
        or (x.ndim, w.ndim) != (_BATCHES[func], 3)
        or (offs is None) == (func is _GROUPED)
        or (offs is None and len(x) != len(w))
    ):
        given = {"offs": offs} if offs is not None else {}
        return func(x, w, *rest, **given, **kwargs)
    if offs is None and torch.is_autocast_enabled(device) and w.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, w = x.to(dtype), w.to(dtype)
    return _RowsProduct.apply(x, w, offs, stack.active_E)  # type: ignore[no-untyped-call]


class _RowsProduct(torch.autograd.Function):
    """Product with a stack of matrices, as a batch or in groups that end at `offs`; active rows get gradients.

    Operands are laid out as in torch's own backward: another order of summation would give other bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_EKN: Tensor, offs: Tensor | None, active_E: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_EKN, offs)
        ctx.active_E = active_E
        return _multiply(x, w_EKN, offs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w_EKN, offs = ctx.saved_tensors
        of_x, of_w = None, None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(gradient, w_EKN.mT, offs)
        if ctx.needs_input_grad[1]:
            of_w = torch.zeros_like(w_EKN)
            columns = offs is not None and w_EKN.stride(-2) == 1 and w_EKN.stride(-1) != 1
            for start, stop in _runs(ctx.active_E):
                rows, ends = slice(start, stop), None
                if offs is not None:
                    first = int(offs[start - 1]) if start else 0
                    rows, ends = slice(first, int(offs[stop - 1])), offs[start:stop] - first
                if columns:
                    of_w[start:stop] = _multiply(gradient[rows].mT, x[rows], ends).mT
                else:
                    of_w[start:stop] = _multiply(x[rows].mT, gradient[rows], ends)
        return of_x, of_w, None, None


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
_PRODUCTS: frozenset[Any] = frozenset(_BATCHES) | {
    *(nn.functional.linear, torch.mm, Tensor.mm, Tensor.__rmatmul__, torch.addmm, torch.baddbmm, torch.einsum),
    *(torch.embedding, torch.conv1d, torch.conv2d, torch.conv3d, nn.functional.bilinear),
}
"""Functions whose gradients are worth leaving out."""
