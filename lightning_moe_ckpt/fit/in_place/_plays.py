"""Play a rank's role in a step, on this rank or another one: forward and backward; only digests stay.

The input of a step beside weights is its *role*: batch, random state, buffers, and attributes that training has changed. It travels as
bytes. A play goes around strategy, hooks and optimizer: gradients are digested as backward makes them, before any reduction, and
dropped. The step that counts is digested in the same places, so it is audited itself, under whatever strategy.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self, override
from xxhash import xxh3_64_intdigest

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.fit._run import FitSession
from lightning_moe_ckpt.journal import HeldGenerator, capture_rng, decode, encode, restore_rng
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet
from lightning_moe_ckpt.parallel._upstream import digests_of
from lightning_moe_ckpt.process import MADE, Messages, Trace

_WORD = 2**64
_IN_ANY_ORDER = ("alltoall", "all_to_all", "send", "recv", "wait", "barrier", "broadcast")


class Play:
    """Digests of one forward and backward while entered: this rank's messages, and gradients in `module` by operator."""

    def __init__(self, module: LightningModule, operators: OperatorSet, *, keeps: bool = False) -> None:
        self._parts: dict[str, list[tuple[str, slice]]] = {}
        for operator in operators:
            for piece in operator.slices:
                self._parts.setdefault(piece.fqn, []).append((operator.name, slice(piece.start, piece.stop)))
        self._params = {fqn: each for fqn, each in module.named_parameters() if each.requires_grad}
        self._keeps, self._handles = keeps, list[RemovableHandle]()
        self._messages: list[tuple[int, Tensor | int]] = []
        self._made: list[tuple[str, Tensor | int]] = []

    def __enter__(self) -> Self:
        Messages.listener = self._hear
        for fqn, param in self._params.items():
            self._handles.append(param.register_hook(partial(self._take, fqn)))  # type: ignore[no-untyped-call]
            if not self._keeps:
                dropped = param.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
                self._handles.append(dropped)
        return self

    def __exit__(self, *_: object) -> None:
        Messages.listener = None
        while self._handles:
            self._handles.pop().remove()

    @property
    def gradients(self) -> dict[str, int]:
        """Gradients' digests by operator; micro-batches are added up, in whatever order they came."""
        sums: dict[str, int] = {}
        for name, digest in self._made:
            sums[name] = (sums.get(name, 0) + int(digest)) % _WORD
        return dict(sorted(sums.items()))

    @property
    def trace(self) -> Trace:
        """Messages' digests in order, and behind them the gradients' digest."""
        made = xxh3_64_intdigest(repr(self.gradients).encode()) - _WORD // 2
        return [*([kind, int(digest)] for kind, digest in self._messages), [MADE, made]]

    def _hear(self, kind: int, tensors: Sequence[Tensor]) -> None:
        self._messages += [(kind, digest) for digest in digests_of(tensors)]

    @torch.no_grad()
    def _take(self, fqn: str, grad: Tensor) -> None:
        flat = (grad if grad.layout is torch.strided else grad.to_dense()).detach().reshape(-1)
        parts = self._parts.get(fqn) or [(fqn, slice(None))]
        self._made += zip([name for name, _ in parts], digests_of([flat[part] for _, part in parts]), strict=True)


def _drop(param: nn.Parameter) -> None:
    param.grad = None


@contextmanager
def gradients_aside(module: nn.Module) -> Iterator[None]:
    """Put gradients back behind the body; meanwhile there are none."""
    kept = [(param, param.grad) for param in module.parameters()]
    try:
        for param, _ in kept:
            param.grad = None
        yield
    finally:
        for param, grad in kept:
            param.grad = grad


def hold_counts() -> list[Callable[[], None]]:
    """Return functions to restore the present counts of tokens: a play is no step."""
    return [undo for counter in [*LoadCounter.installed] for undo in counter.hold()]


def play_step(trainer: Trainer, module: LightningModule, arguments: tuple[Any, ...]) -> None:
    """Run a step's forward and backward, and nothing else that belongs to a step."""
    if getattr(trainer.strategy, "pipeline_parallel", 1) > 1:
        strategy: Any = trainer.strategy
        strategy.play(arguments[0])
        return
    with trainer.precision_plugin.train_step_context():
        output = module.training_step(*arguments)
    loss = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches).closure_loss
    if loss is not None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        module.backward(loss if scaler is None else scaler.scale(loss))


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves these untyped
    """Names of operations between ranks, while entered, whose result depends on the ranks' order; not of logged values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and not name.startswith(_IN_ANY_ORDER) and not _is_logged():
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def _is_logged() -> bool:
    """Return whether Lightning is reducing a logged value."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if "logger_connector" in frame.f_code.co_filename:
            return True
    return False


class Role:
    """Input of this rank's step beside weights, as the step begins; `take_up` lets this rank have another one's."""

    def __init__(self, trainer: Trainer, module: LightningModule, run: FitSession, arguments: tuple[Any, ...]) -> None:
        self._module, self._run, self._device = module, run, trainer.strategy.root_device
        self._batch, self._others = arguments[0], arguments[1:]
        wrapper: Any = trainer.model
        if isinstance(wrapper, DistributedDataParallel) and wrapper._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            wrapper._sync_buffers()  # type: ignore[no-untyped-call]  # as forward is about to do

    def sent(self, *, buffers: bool) -> bytes:
        """Return this rank's role. Raises `CodecError` for a batch with values of other types than a journal has."""
        batch = _plain(self._batch)
        random = dict(capture_rng(held=self._held()))
        if "cuda" in random:
            random["cuda"] = random["cuda"][self._device.index or 0]
        own = {"batch": batch, "others": self._others, "random": random, "part": self._run.part_of_step()}
        own["moved"] = [isinstance(each, Tensor) and each.device == self._device for each in pytree.tree_leaves(batch)]
        return encode({**own, "buffers": dict(self._module.named_buffers()) if buffers else {}})

    def buffers_digest(self) -> int:
        """Return one digest for all buffers."""
        found = [int(digest) for digest in digests_of([*self._module.buffers()])]
        return xxh3_64_intdigest(repr(found).encode()) - _WORD // 2

    @torch.no_grad()
    def take_up(self, sent: bytes) -> tuple[Any, ...]:
        """Put everything in place for a role, and return the arguments of its step. The caller undoes that."""
        role = decode(sent)
        own = dict(self._module.named_buffers())
        for name, value in role["buffers"].items():
            if own[name].shape == value.shape:
                own[name].copy_(value)
            else:
                owner, _, key = name.rpartition(".")
                self._module.get_submodule(owner)._buffers[key] = value.to(own[name].device)
        self._run.take_part_of_step(role["part"])
        random, held = role["random"], self._held()
        if "cuda" in random:
            here = capture_rng()
            here["cuda"][self._device.index or 0] = random["cuda"]
            random |= {"cuda": here["cuda"]}
        restore_rng(random, held=held)
        leaves, shape = pytree.tree_flatten(role["batch"])
        pairs = zip(leaves, role["moved"], strict=True)
        # A copy: what is decoded lies in the middle of a message, and kernels may round otherwise there.
        leaves = [each.to(self._device, copy=True) if moves else each for each, moves in pairs]
        return _like(self._batch, pytree.tree_unflatten(leaves, shape)), *role["others"]

    def _held(self) -> Mapping[str, HeldGenerator]:
        return {str(at): each for at, each in enumerate(self._run.generators())}


def _plain(batch: Any) -> Any:
    """Return a batch as a type that can be sent, where it is a mapping or a dataclass of another one."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not OrderedDict else batch


def _like(own: Any, batch: Any) -> Any:
    """Invert `_plain`: return a batch of the type that this rank's own has."""
    if is_dataclass(own) and not isinstance(own, type):
        return replace(own, **batch)
    make: Any = type(own)
    return make(batch) if isinstance(own, Mapping) and make is not dict else batch


def pass_on(exchange: Exchange, own: bytes, *, to: int, source: int) -> bytes | None:
    """Send bytes to a rank, and return those that another one sends here; `None` if some rank has none. Collective."""
    sizes = [row[0] for row in exchange.gather([len(own)])]
    if 0 in sizes:
        return None
    incoming = bytearray(sizes[source])
    exchange.transfer([(to, memoryview(own))], [(source, memoryview(incoming))])()
    return bytes(incoming)
