"""Play a rank's role in a step, on this rank or another one: forward and backward, leaving digests alone.

The inputs to a step beside weights are its *role*: batch, random state, buffers, and attributes that training has changed. A role
travels as bytes. A play goes around strategy, hooks and optimizer: gradients are digested as backward makes them, before any reduction, and
dropped. The step that counts is digested in the same places, so it is audited itself, under whatever strategy.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self, override
from xxhash import xxh3_64_intdigest

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError, CodecError
from lightning_moe_ckpt.fit._run import FitSession
from lightning_moe_ckpt.fit.objects._users import space_of
from lightning_moe_ckpt.journal import HeldGenerator, capture_rng, decode, encode, restore_rng
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.parallel._upstream import digests_of
from lightning_moe_ckpt.process import MADE, RECEIVED, Messages, Trace

_WORD = 2**64
_IN_ANY_ORDER = ("alltoall", "all_to_all", "send", "recv", "wait", "barrier")
_VALUES = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format)
_AVERAGES = ("running_mean", "running_var")


class Play:
    """Digests of one forward and backward while entered: this rank's messages, and gradients in `module` by operator."""

    def __init__(self, module: LightningModule, operators: OperatorSet, operations: Operations | None = None) -> None:
        self.operations, self.failed = operations, ""
        """Operations of a play apart from training, `None` for the step that counts; and why it could not be played."""
        self._parts: dict[str, list[tuple[str, slice]]] = {}
        for operator in operators:
            for piece in operator.slices:
                self._parts.setdefault(piece.fqn, []).append((operator.name, slice(piece.start, piece.stop)))
        self._params = {fqn: each for fqn, each in module.named_parameters() if each.requires_grad}
        self._handles = list[RemovableHandle]()
        self._messages: list[tuple[int, Tensor | int]] = []
        self._made: list[tuple[str, Tensor | int]] = []

    def __enter__(self) -> Self:
        Messages.listener = self._hear
        if self.operations is not None:
            self.operations.__enter__()  # type: ignore[no-untyped-call]
        for fqn, param in self._params.items():
            self._handles.append(param.register_hook(partial(self._take, fqn)))  # type: ignore[no-untyped-call]
            if self.operations is not None:
                dropped = param.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
                self._handles.append(dropped)
        return self

    def __exit__(self, *_: object) -> None:
        Messages.listener = None
        if self.operations is not None:
            self.operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        while self._handles:
            self._handles.pop().remove()

    @property
    def gradients(self) -> dict[str, int]:
        """Digests of gradients by operator, summed over micro-batches, in whatever order they came."""
        sums: dict[str, int] = {}
        for name, digest in self._made:
            sums[name] = (sums.get(name, 0) + int(digest)) % _WORD
        return dict(sorted(sums.items()))

    @property
    def trace(self) -> Trace:
        """Digests of messages in order, and last that of all gradients."""
        made = xxh3_64_intdigest(repr(self.gradients).encode()) - _WORD // 2
        return [*([kind, int(digest)] for kind, digest in self._messages), [MADE, made]]

    def _hear(self, kind: int, tensors: Sequence[Tensor]) -> None:
        self._messages += [(kind, digest) for digest in digests_of(tensors)]
        if kind == RECEIVED and self.operations is not None:
            self.operations.received(tensors)

    @torch.no_grad()
    def _take(self, fqn: str, grad: Tensor) -> None:
        if self.operations is not None:
            self.operations.end(grad)
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


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves these untyped
    """Tensor operations of a play, while entered: what they overwrite is copied before, and `restore` puts it back.

    With `listed` each operation has a key, made of its name, its numbers, and of each tensor: the key of the operation that made it, or,
    if it is from before the play, its content. So two plays that called for the same work have the same keys, and where one key has two
    results, a device has computed two things. Other work has other keys, from the first thing on that differs.
    """

    def __init__(self, *, listed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: set[str] = set()
        """Names of operations between ranks whose result depends on the ranks' order; not of logged values."""
        self.results: dict[int, int] = {}
        """Digest of the result by key, in order."""
        self.ends: list[int] = []
        """Keys of the gradients."""
        self._names: dict[int, str] = {}
        self._parents: dict[int, list[int]] = {}
        self._listed = listed
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        """Memory of the play itself, with the key of what wrote it; 0 if that was not an operation. References keep places from being
        given again."""
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Memory from before the play, with a copy."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not {Tensor, nn.Parameter}.issuperset(types):
            return NotImplemented  # a kind of tensor that is made of others, on which operations follow
        kwargs, between = kwargs or {}, "c10d" in func.namespace
        name, names, written = _known(func)
        if between and not name.startswith(_IN_ANY_ORDER) and not _is_logged():
            self.asked.add(name)
        tensors = [*_tensors((args, kwargs))]
        over = tensors if between else [*_tensors([_argument(at, names, args, kwargs) for at in written])]
        for each in over:
            self._keep(each)
        has_key = self._listed and not between and not name.startswith(("empty", "new_empty"))
        key = self._key(func, [args, kwargs], {*map(id, over)}) if has_key else 0
        result = func(*args, **kwargs)
        if has_key:
            digest = _digest(result)
            if torch.Tag.nondeterministic_seeded in func.tags:
                key = self._name(_hash([key, digest]), name, [key])  # what follows from other numbers is other work
            self.results[key] = digest
        before = {_place(each) for each in tensors}
        for at, each in enumerate(_tensors([result])):
            if (place := _place(each)) and place not in before:
                made = self._name(_hash([key, at]), name, [key]) if key else 0
                self._made[place] = StorageWeakRef(each.untyped_storage()), made  # type: ignore[no-untyped-call]
        for each in over:
            if (place := _place(each)) in self._made:
                self._made[place] = self._made[place][0], key
        return result

    def received(self, tensors: Sequence[Tensor]) -> None:
        """Note that another rank has filled tensors."""
        for each in tensors:
            self._made[_place(each)] = StorageWeakRef(each.untyped_storage()), 0  # type: ignore[no-untyped-call]

    def end(self, gradient: Tensor) -> None:
        """Note a gradient."""
        if self._listed:
            self.ends.append(self._source(gradient)[0])

    def parting(self, other: bytes) -> list[str]:
        """Return how another play parts from this one, `device` or `code`, and in which operation; empty if it does not."""
        keys, results = np.frombuffer(other, np.int64).reshape(2, -1)
        theirs = dict(zip(keys.tolist(), results.tolist(), strict=True))
        for key, result in self.results.items():
            if theirs.get(key, result) != result:
                return ["device", self._names[key]]
        if theirs.get(0) == _hash(sorted(self.ends)):
            return []
        waiting, needed = [*self.ends], set[int]()
        while waiting:
            if (key := waiting.pop()) not in needed:
                needed.add(key)
                waiting += self._parents.get(key, [])
        others = (self._names[key] for key in self.results if key in needed and key not in theirs)
        return ["code", next(others, "its end")]

    @property
    def rows(self) -> bytes:
        """Results by key, and under 0 the digest of all gradients' keys, for `parting`."""
        rows = {**self.results, 0: _hash(sorted(self.ends))}
        return np.array([[*rows], [*rows.values()]], np.int64).tobytes()

    def restore(self) -> None:
        """Put back what was overwritten."""
        for storage, copy in self._kept.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)

    def _keep(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise CheckpointError("it writes into a sparse tensor")
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made and storage._cdata not in self._kept:
            self._kept[storage._cdata] = storage, storage.clone()  # type: ignore[no-untyped-call]

    def _key(self, func: Any, given: Any, over: Collection[int]) -> int:
        own, parents = [str(func)], list[int]()
        for each in pytree.tree_leaves(given):
            if isinstance(each, Tensor):
                source, is_raw = self._source(each)
                if not (is_raw and id(each) in over):  # what is there before it is written has no meaning
                    parents.append(source)
            elif isinstance(each, _VALUES):
                own.append(repr(each))
        return self._name(_hash([own, parents]), func.overloadpacket.__name__, parents)

    def _name(self, key: int, name: str, parents: list[int]) -> int:
        self._names[key], self._parents[key] = name, parents
        return key

    def _source(self, tensor: Tensor) -> tuple[int, bool]:
        """Return the key of what made a tensor, or of its content, and whether it is memory that no operation has filled."""
        if not (place := _place(tensor)):
            return _hash([str(tensor.layout)]), False
        made = self._made.get(place, (None, 0))[1]
        what = made or int(digests_of([tensor])[0])
        sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
        key = _hash([what, sizes, tensor.storage_offset() if made else 0])
        self._parents[key] = [made]
        return key, place in self._made and not made


def _digest(result: Any) -> int:
    leaves = pytree.tree_leaves(result)
    dense = [each for each in leaves if isinstance(each, Tensor) and each.layout is torch.strided]
    return _hash([*map(int, digests_of(dense)), *(repr(each) for each in leaves if isinstance(each, _VALUES))])


def _place(tensor: Tensor) -> int:
    """Return what stands for a tensor's memory; 0 for one without."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _hash(values: Sequence[object]) -> int:
    return xxh3_64_intdigest(repr(values).encode()) - _WORD // 2


@functools.lru_cache(maxsize=4096)
def _known(func: Any) -> tuple[str, list[str], list[int]]:
    """Return an operation's name, the names of its arguments, and the places of those that it overwrites."""
    arguments = func._schema.arguments
    names = [each.name for each in arguments]
    written = [at for at, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]
    # Schemas of normalization do not say that they write their averages.
    return func.overloadpacket.__name__, names, written or [at for at, name in enumerate(names) if name in _AVERAGES]


def _argument(at: int, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[at] if at < len(args) else kwargs.get(names[at])


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values.values() if isinstance(values, dict) else values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple | dict):
            yield from _tensors(each)


def _is_logged() -> bool:
    """Return whether Lightning is reducing a logged value."""
    stack = traceback.walk_stack(sys._getframe())
    return any("logger_connector" in frame.f_code.co_filename for frame, _ in stack)


class Role:
    """Inputs to this rank's step beside weights, as the step begins; `take_up` puts another rank's in their place."""

    def __init__(self, trainer: Trainer, module: LightningModule, run: FitSession, arguments: tuple[Any, ...]) -> None:
        self._module, self._run, self._device = module, run, trainer.strategy.root_device
        self.arguments, self.unsent = arguments, ""
        """Arguments of the step, and why the role could not be sent."""
        wrapper: Any = trainer.model
        if isinstance(wrapper, DistributedDataParallel) and wrapper._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
            wrapper._sync_buffers()  # type: ignore[no-untyped-call]  # as forward is about to do

    def sent(self, *, buffers: bool) -> bytes:
        """Return this rank's role as bytes, or none, with the reason in `unsent`, if a journal lacks a type in the batch."""
        random = dict(capture_rng(held=self._held()))
        if "cuda" in random:
            random["cuda"] = random["cuda"][self._device.index or 0]
        own = {"random": random, "buffers": dict(self._module.named_buffers()) if buffers else None}
        try:
            batch = _packed(self.arguments, self._device)
            return encode({**own, "arguments": batch, "part": self._run.part_of_step()})
        except Exception as error:  # noqa: BLE001  # a batch's own code may raise anything
            self.unsent = f"a batch cannot be sent to another rank: {error}"
            return b""

    def buffers_digest(self) -> int:
        return _hash([*map(int, digests_of([*self._module.buffers()]))])

    @torch.no_grad()
    def take_up(self, sent: bytes) -> tuple[Any, ...]:
        """Put everything in place for a role, and return its step's arguments. The caller undoes that."""
        role = decode(sent)
        if role["buffers"] is not None:
            self._take_buffers(role["buffers"])
        self._run.take_part_of_step(role["part"])
        random, held = role["random"], self._held()
        if "cuda" in random:
            here = capture_rng()
            here["cuda"][self._device.index or 0] = random["cuda"]
            random |= {"cuda": here["cuda"]}
        restore_rng(random, held=held)
        arguments: tuple[Any, ...] = _unpacked(role["arguments"], self._device)
        return arguments

    def _take_buffers(self, values: Mapping[str, Tensor]) -> None:
        own = dict(self._module.named_buffers())
        for name in {**own, **values}:
            owner, _, key = name.rpartition(".")
            place, value = self._module.get_submodule(owner)._buffers, values.get(name)
            if value is None:
                del place[key]  # made by a step of this rank alone
            elif name in own and own[name].shape == value.shape:
                own[name].copy_(value)
            else:
                place[key] = value.to(self._device)

    def _held(self) -> Mapping[str, HeldGenerator]:
        return {str(at): each for at, each in enumerate(self._run.generators())}


_CLASSES: dict[str, Any] = {"items": (tuple, list), "pairs": dict, "mapping": Mapping, "fields": object}


def _packed(value: Any, device: torch.device) -> Any:
    """Return a batch as nodes that a journal can hold: kind, class, content. Nothing of a class but its name is sent."""
    kind, within = type(value), functools.partial(_packed, device=device)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, Tensor):
        keeps = torch.empty_like(value, device="meta").stride() == value.stride() and not value.is_contiguous()
        return ["tensor", value.device == device, value, [*value.stride()] if keeps else None]
    if is_dataclass(value) and not isinstance(value, type):
        return ["fields", name, [[key, within(each)] for key, each in space_of(value).items()]]
    if kind is list or (isinstance(value, tuple) and kind is not torch.Size):
        return ["items", name, [*map(within, value)]]
    if isinstance(value, dict) and kind not in (OrderedDict, defaultdict, Counter):
        pairs, space = [[key, within(each)] for key, each in value.items()], getattr(value, "__dict__", {}) or None
        return ["pairs", name, pairs, within(space)]
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return ["mapping", name, [[key, within(each)] for key, each in value.items()]]
    return ["plain", "", value]


def _unpacked(node: Any, device: torch.device) -> Any:
    """Invert `_packed`. No code of a class is run but a mapping's constructor. Raises `CodecError` for a class that is not here."""
    kind, name, content, *more = node
    within = functools.partial(_unpacked, device=device)
    if kind == "tensor":
        # A copy: what is decoded lies in the middle of a message, and kernels may round otherwise there.
        own, strides = device if name else None, more[0] or content.stride()
        return torch.empty_strided(content.shape, strides, dtype=content.dtype, device=own).copy_(content)
    if kind == "plain":
        return content
    module, _, path = name.partition(":")
    made: Any = functools.reduce(lambda each, key: getattr(each, key, None), path.split("."), sys.modules.get(module))
    if not isinstance(made, type) or not issubclass(made, _CLASSES[kind]):
        raise CodecError(f"the class `{path}` of a batch is not known on every rank")
    found: Any = made
    if kind == "items":
        items = [*map(within, content)]
        return items if found is list else tuple.__new__(found, items)
    pairs = {key: within(each) for key, each in content}
    if kind == "mapping":
        return found(pairs)
    made = found.__new__(found)
    if kind == "pairs":
        dict.update(made, pairs)
        pairs = within(more[0]) or {}
    for key, each in pairs.items():
        object.__setattr__(made, key, each)
    return made


def pass_on(exchange: Exchange, own: bytes, *, to: int, source: int) -> bytes | None:
    """Send bytes to a rank, and return those that another one sends here; `None` if some rank has none. Collective."""
    sizes = [row[0] for row in exchange.gather([len(own)])]
    if 0 in sizes:
        return None
    incoming = bytearray(sizes[source])
    exchange.transfer([(to, memoryview(own))], [(source, memoryview(incoming))])()
    return bytes(incoming)
