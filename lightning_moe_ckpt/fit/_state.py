"""Take a run's state outside of parameters, buffers and loops: users' state, trained parameters, MoE attributes.

Users attach state to callbacks, to the module's `on_save_checkpoint` and to the data module. All this state is optional
and of any type. State that the journal cannot store exactly is left out, and a warning names it once: it starts anew
after a restart, while the rest of the run is restored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError, IdentityMismatch
from lightning_moe_ckpt.fit.loops._trainer import datamodule_of, groups_of
from lightning_moe_ckpt.journal import Constant, Written, differs, refusals, written
from lightning_moe_ckpt.operators import MoELayerSpec, is_sharded, memory_of, show_shards, stepped_parameters
from lightning_moe_ckpt.parallel import GradientReducer

log = rank_logger(__name__)

_GIVEN = ("state_dict", "epoch", "global_step")
"""Keys of Lightning's checkpoint that a module's hook may expect; not stored as its state."""


class JournalPart(Protocol):
    """Further state that belongs to a boundary."""

    def take(self) -> dict[str, Any]:
        """Return the state, in types that the journal stores."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state` in a resumed run. Callbacks have been restored before."""

    def follow(self, state: dict[str, Any]) -> None:
        """Set the state in replay, at the moment when the original run took it. Callbacks have been set before."""


class Extras:
    """Take users' state, and remember parts that cannot be stored."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._refused: set[str] = set()
        self._accepted: set[str] = set()

    def take_callbacks(self, callbacks: Sequence[Callback]) -> dict[str, Any]:
        """Return the states of callbacks, by state key."""
        for callback in callbacks:
            if isinstance(callback, SpikeDetection) and not is_overridden("load_state_dict", callback, SpikeDetection):
                self._refuse(
                    callback.state_key, "Lightning's class cannot load what it saves; its running mean begins anew"
                )
        states = {c.state_key: c.state_dict() for c in callbacks if c.state_key not in self._refused}
        return {key: copied(state) for key, state in states.items() if state and self._storable(key, state)}

    def take_owners(self) -> dict[str, Any]:
        """Return additions of the module's `on_save_checkpoint` to a checkpoint, and the data module's `state_dict`."""
        return {"module": self._take_module(self._module), "datamodule": self._take_datamodule()}

    def restore_owners(self, wanted: Mapping[str, Any], here: Mapping[str, Any] | None = None) -> None:
        """Load the result of `take_owners`, except states equal to `here` (default: now): loading runs users' code."""
        here, names = self.take_owners() if here is None else here, ("module", "datamodule")
        module, datamodule = (copied(wanted[name]) if differs(wanted[name], here.get(name)) else {} for name in names)
        if module:
            self._module.on_load_checkpoint(module)
        owner = datamodule_of(self._trainer)
        if datamodule and owner is not None:
            owner.load_state_dict(datamodule)

    def _take_module(self, module: LightningModule) -> dict[str, Any]:
        name = f"`{type(module).__qualname__}.on_save_checkpoint`"
        if name in self._refused or not is_overridden("on_save_checkpoint", module):
            return {}
        place = {"epoch": module.current_epoch, "global_step": module.global_step}
        checkpoint: dict[str, Any] = {"state_dict": {}, **place}
        try:
            with isolate_rng(include_cuda=False):  # its draws are none of training
                module.on_save_checkpoint(checkpoint)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            self._refuse(name, f"it raised {error!r}; it is called without the model's state")
            return {}
        added = {key: value for key, value in checkpoint.items() if key not in _GIVEN}
        return copied(added) if self._storable(name, added) else {}

    def _take_datamodule(self) -> dict[str, Any]:
        datamodule = datamodule_of(self._trainer)
        if datamodule is None or not is_overridden("state_dict", datamodule):
            return {}
        with isolate_rng(include_cuda=False):
            name, state = f"`{type(datamodule).__qualname__}.state_dict`", datamodule.state_dict()
        return copied(state) if name not in self._refused and self._storable(name, state) else {}

    def _storable(self, name: str, state: object) -> bool:
        if name not in self._accepted and name not in self._refused:
            if reasons := refusals(state):
                self._refuse(name, "; ".join(reasons[:3]))
            else:
                self._accepted.add(name)  # checked once: a later change of type fails a window and is reported then
        return name not in self._refused

    def _refuse(self, name: str, reason: str) -> None:
        if name in self._refused:
            return
        self._refused.add(name)
        log.warning("the state of %s is not restored after a restart: %s", name, reason, alike=True)


def require_storable(states: Mapping[str, object]) -> None:
    """Require that all `states`, on which training depends, can be stored exactly. Raises `ConfigurationError` if some values cannot be
    stored; the message names them.
    """
    for name, state in states.items():
        if reasons := refusals(state):
            raise ConfigurationError(
                f"The state of {name} cannot be stored exactly: {'; '.join(reasons[:3])}. "
                "Give it a `state_dict` of plain values and tensors."
            )


_ATOMS = {type(None), bool, int, float, str, bytes, Constant, Written}
"""Types of values that nobody can change, or does."""


def copied(value: Any) -> Any:
    """Return a deep copy with tensors detached, so that no journal shares memory with training."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if kind is dict:
        return {key: item if type(item) in _ATOMS else copied(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _ATOMS else copied(item) for item in value]
    return value if kind in _ATOMS else copy.deepcopy(value)


class _Registered:
    """Parameters and buffers that a module has registered when `fit` begins: no restart restores others.

    FSDP2 registers whole parameters in the place of shards between forward and backward, and behind a validation until the next
    backward.
    """

    def __init__(self, module: nn.Module) -> None:
        show_shards(module)
        self._module, self._known = module, {name for name, _ in module.named_buffers()}
        self._owners_of_buffers = [each._buffers for each in module.modules()]
        self._most = sum(map(len, self._owners_of_buffers))
        found = [
            (each._parameters, *item) for each in module.modules() for item in each._parameters.items()
        ]  # no call per module
        self._owners, self._params = [owner for owner, _, _ in found], [param for _, _, param in found]
        self._names = [name for _, name, _ in found]

    def replaced(self) -> list[tuple[str, nn.Parameter | None]]:
        """Return parameters in whose place the user has put others; warn of new buffers, once."""
        if (now := sum(map(len, self._owners_of_buffers))) > self._most:
            self._most = now
            new = [name for name, _ in self._module.named_buffers() if name not in self._known]
            log.warning(
                "not restored after a restart: buffers %s. Register them before `fit`", ", ".join(new), alike=True
            )
        if all(map(is_, map(dict.get, self._owners, self._names), self._params)):
            return []
        show_shards(self._module)
        places = zip(self._owners, self._names, self._params, strict=True)
        return [(name, param) for owner, name, param in places if owner.get(name) is not param]


class Trained:
    """Take and restore the user's choice of trained parameters: `requires_grad`, and groups added to the optimizer.

    Usually no step uses the previous step's gradients. If the user zeroes in another way than Lightning's, or accumulates
    otherwise within an epoch, it is recorded which parameters have a gradient: the optimizer skips parameters without, but
    moves those with a zero gradient. So are gradients with which a step was once seen to begin, see `left_over`.

    The optimizer is as configured by the user, with the groups with which every process of the run begins. In a
    `staged` module, forward and backward are one call, and nothing can look in between.

    Of a sharded module, parameters are shards, and a gradient is taken as this rank holds it.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *, staged: bool) -> None:
        self._strategy, optimizer = trainer.strategy, trainer.optimizers[0]
        self._registered = _Registered(module)
        self.edits_unseen = is_sharded(module) and is_overridden("lr_scheduler_step", module)
        """Possibility of edits without a trace while a boundary is copied, outside of validation and the epoch's hooks.

        Version counters of shards do not count `torch._foreach_*`, and `lr_scheduler_step` is the user's. Code that moves a batch to
        its device is taken to leave weights alone.
        """
        self._params, self._optimizer = dict(module.named_parameters()), optimizer
        self._stepped = stepped_parameters(module)
        """Parameters as the optimizer has them, with gradients."""
        self._names = {id(param): name for name, param in chain(self._params.items(), self._stepped.items())}
        self._may_keep = (
            is_overridden("optimizer_zero_grad", module)
            or not module.automatic_optimization
            or type(optimizer).zero_grad is not Optimizer.zero_grad
        )
        self.looks, self._staged = self._may_keep and not staged, staged
        """Whether a step may begin with the previous step's gradients."""
        self._kept: set[str] = set()
        self._guessed: set[str] = set()
        self._num_configured = len(optimizer.param_groups)
        self._configured = [param for group in optimizer.param_groups for param in group["params"]]
        self._told = False
        self._num_seen = len(optimizer.param_groups)
        self.may_begin = False
        """Whether the coming step may begin with gradients that the boundary at hand lacks."""
        self.awaited: dict[str, Any] | None = None
        """Start half whose gradients the next batch begins with, until it begins; `None` if nothing was loaded."""
        self._place = slice(0), 0
        """Places of this stage's parameters among all stages', and the number of these, once asked for."""
        self._order: tuple[Any, dict[str, Written]] = (None, {})
        """Number and last key of the optimizer's states when the order was last read, and the unusual order then."""

    def regrouped(self) -> bool:
        """Return whether the optimizer has other groups than at the last call."""
        before, self._num_seen = self._num_seen, len(self._optimizer.param_groups)
        return before != self._num_seen

    def begin(self) -> None:
        """Include gradients left by an earlier fit, until it is known whether the first step begins with them."""
        self._guessed = set(self.left_over())

    def not_zeroed(self) -> None:
        """Look at gradients from here on, since a step has begun without a call that zeroes them."""
        self._may_keep, self.looks = True, not self._staged

    def left_over(self) -> list[str]:
        """Return newly found parameters with a gradient at a step's begin; call before its first backward pass."""
        if not self.looks:
            return []
        if self._reducer is not None:
            self._reducer.pieces.drop_cleared()
        graded = {name: param.grad for name, param in self._stepped.items() if param.grad is not None}
        known, self._guessed = self._kept - self._guessed, set()
        left = [name for name, some in zip(graded, _are_something(list(graded.values())), strict=True) if some]
        found = [name for name in left if name not in self._kept]
        self._kept = known.union(left)
        return found

    def take(self) -> dict[str, Any]:
        """Return the state, in types that the journal stores."""
        added = self._optimizer.param_groups[self._num_configured :]
        if self._reducer is not None:
            self._reducer.pieces.drop_cleared()
        graded = (param.grad is not None for param in self._stepped.values()) if self._may_keep else ()
        kept = {name: self._stepped[name].grad for name in sorted(self._kept)}
        copies = {name: _copied_shard(each) for name, each in kept.items() if each is not None}
        partial = {}
        if self._may_keep:
            partial = {name: sums for name, param in self._stepped.items() if (sums := _partial(param.grad))}
        return {
            "gradients": bytes(graded),
            **({"kept": copies} if kept else {}),
            **({"partial": partial} if partial else {}),
            "requires_grad": bytes(map(attrgetter("requires_grad"), self._params.values())),
            "added": [[self._names.get(id(param), "?") for param in group["params"]] for group in added],
            **self._take_order(),
        }

    def take_left_over(self, taken: dict[str, Any]) -> None:
        """Add to `taken` gradients with which the next step may begin and which were not known to be kept."""
        gradients = {name: self._stepped[name].grad for name in self.left_over()}
        if left := {name: _copied_shard(each) for name, each in gradients.items() if each is not None}:
            taken["kept"] = {**taken.get("kept", {}), **left}

    def own(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this pipeline stage's part if the state has all stages. Collective in the first call with such a state."""
        if len(state["requires_grad"]) == len(self._params):
            return state
        if not self._place[1]:
            groups = groups_of(self._strategy)
            rows = Exchange(groups).gather([len(self._params)])[:: groups.stage_size]
            first = sum(number for (number,) in rows[: groups.stage])
            self._place = slice(first, first + len(self._params)), sum(number for (number,) in rows)
        added = [[name for name in names if name in self._stepped] for names in state["added"]]
        return {**state, "added": added, **{name: self._part(state[name]) for name in ("requires_grad", "gradients")}}

    def _part(self, flags: bytes) -> bytes:
        """Return this stage's part of flags by parameter of all stages, or flags that are alike, for other parameters of experts."""
        place, everything = self._place
        if len(flags) == everything:
            return flags[place]
        if len(set(flags)) < 2:
            return flags[:1] * len(self._params)
        raise IdentityMismatch(
            f"The run has {len(flags)} parameters on a rank, this one {len(self._params)}, and only some train: which, cannot be told. Resume with "
            "`expert_parallel` as it was, or with stacked experts."
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state. New groups get the optimizer's defaults; restoring learning rates sets their fields later."""
        state = self.own(state)
        for param, trains in zip(self._params.values(), state["requires_grad"], strict=True):
            if param.requires_grad != bool(trains):  # most have not changed
                param.requires_grad_(bool(trains))
        for names in state["added"][len(self._optimizer.param_groups) - self._num_configured :]:
            self._optimizer.add_param_group({"params": [self._stepped[name] for name in names]})
        self.restore_order(state)

    def _in_groups(self) -> list[nn.Parameter]:
        return list(chain.from_iterable(group["params"] for group in self._optimizer.param_groups))

    def _take_order(self) -> dict[str, Written]:
        """Return the order of the optimizer's state, as places of parameters, and of groups' keys, each if unusual."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        seen = len(state), next(reversed(state), None)
        if self._order[0] is None or seen[0] != self._order[0][0] or seen[1] is not self._order[0][1]:
            places = {id(param): at for at, param in enumerate(self._in_groups())}
            order = [places.get(id(param), -1) for param in state]
            unusual = {"order": written(order)} if order != sorted(order) else {}
            if any(next(iter(group)) != "params" for group in groups):  # as `Optimizer.load_state_dict` leaves them
                unusual["keys"] = written([list(group) for group in groups])
            self._order = seen, unusual
        return self._order[1]

    def restore_order(self, state: Mapping[str, Any]) -> None:
        """Bring the optimizer's state and groups' keys into stored order; in replay entries may be missing or new."""
        now, params, groups = self._optimizer.state, dict(enumerate(self._in_groups())), self._optimizer.param_groups
        _put_in_order(now, [params[at] for at in state.get("order", params) if params.get(at) in now])
        for group, keys in zip(groups, state.get("keys", [["params"]] * len(groups)), strict=False):
            _put_in_order(group, [key for key in keys if key in group])

    def restore_gradients(self) -> None:
        """Restore the `awaited` gradients; call when the next batch begins, after all loading of state."""
        assert self.awaited is not None
        state, self.awaited = self.own(self.awaited["trained"]), None
        self.restore_order(state)
        if state.get("gradients"):
            self.not_zeroed()
        partial = state.get("partial", {})
        for (name, param), graded in zip(self._stepped.items(), state.get("gradients", b""), strict=False):
            if not graded:
                param.grad = None
            elif param.grad is None:
                param.grad = _zero_gradient(param, partial.get(name))
        kept = state.get("kept", {})
        self._kept.update(kept)
        for name, value in kept.items():
            gradient = _zero_gradient(self._stepped[name], partial.get(name))
            memory_of(gradient).copy_(value)
            self._stepped[name].grad = gradient
        if self._reducer is not None:
            self._reducer.pieces.take_up_gradients()

    @property
    def _reducer(self) -> GradientReducer | None:
        found = getattr(self._strategy, "reducer", None)
        return found if isinstance(found, GradientReducer) else None

    def unfit(self) -> str:
        """Return why no restart could go on from here, which is logged once; empty if a restart can.

        Replaced parameters, or another optimizer, are not part of the stored state, and a restart would have the old ones.
        """
        others = self._registered.replaced()
        groups = [group["params"] for group in self._optimizer.param_groups]
        now = list(chain.from_iterable(groups[: self._num_configured]))
        added = chain.from_iterable(groups[self._num_configured :])
        replaced = self._strategy._optimizers != [self._optimizer]
        if (
            not (others or replaced)
            and len(now) == len(self._configured)
            and all(map(is_, now, self._configured))
            and self._names.keys() >= set(map(id, added))
        ):
            return ""
        kept = set(map(id, now))
        gone = [self._names.get(id(param), "?") for param in self._configured if id(param) not in kept]
        gone = gone or [self._names.get(id(param), name) for name, param in others]
        why = (
            ("the trainer has another optimizer" if replaced else "the module or its optimizer has other parameters")
            + " than when `fit` began"
            + (f": without {', '.join(f'`{name}`' for name in gone[:3])}" if gone else "")
            + ". What replaced or left them cannot be restored: change weights in place, stop training a parameter with "
            "`requires_grad_(False)`, and add only parameters that the module has before `fit`."
        )
        if not self._told:
            self._told = True
            log.error("training goes on without checkpoints, and a restart begins before this step: %s", why)
        return why


def _put_in_order(entries: dict[Any, Any], first: Sequence[Any]) -> None:
    """Move the keys in `first` to a dictionary's front, in place and in their order."""
    if not all(map(is_, entries, first)):
        items = {key: entries[key] for key in first} | dict(entries)
        entries.clear()
        entries.update(items)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by an element's bytes."""


def _are_something(gradients: Sequence[Tensor]) -> list[bool]:
    """Return whether each gradient differs from zeros in any bit, as -0.0 does; waits once for a device."""
    held = map(memory_of, gradients)
    dense = (each if each.layout is torch.strided else each.detach().coalesce().values() for each in held)
    counts = [_bits(tensor).count_nonzero() for tensor in dense]
    together = torch.stack([count.to(counts[0].device) for count in counts]) if counts else torch.empty(0)
    return (together > 0).tolist()


def _copied_shard(gradient: Tensor) -> Tensor:
    copy: Tensor = copied(memory_of(gradient))
    return copy


def _partial(gradient: Tensor | None) -> list[str]:
    """Return the reduction that ranks' terms of a gradient await, by mesh dimension, "" for none; empty if there is none at all."""
    placements = gradient.placements if isinstance(gradient, DTensor) else ()
    found = [each.reduce_op if isinstance(each, Partial) else "" for each in placements]
    return found if any(found) else []


def _zero_gradient(param: nn.Parameter, partial: Sequence[str] | None) -> Tensor:
    """Return a gradient of zeros, placed as the parameter, or as `_partial` found another one."""
    zeros = torch.zeros_like(param)
    if not partial or not isinstance(zeros, DTensor):
        return zeros
    placements = [Partial(op) if op else each for op, each in zip(partial, zeros.placements, strict=True)]
    return DTensor.from_local(memory_of(zeros), zeros.device_mesh, placements, shape=zeros.shape, stride=zeros.stride())


def _bits(tensor: Tensor) -> Tensor:
    kind = _BITS.get(tensor.dtype.itemsize)
    return tensor.detach() if kind is None else tensor.detach().view(kind)


def _unwrapped(value: object) -> object:
    return value.getvalue() if isinstance(value, BytesIO) else value  # TransformerEngine before 2.0


class LayerState:
    """Take and restore live capacity and plain attributes of all MoE layers, through the views in their specs.

    Includes the result of `get_extra_state` of modules of any kind, such as the scales of fp8 layers. Raises `ConfigurationError` if a
    layer has state that cannot be stored exactly.
    """

    def __init__(self, module: nn.Module, layers: Sequence[MoELayerSpec]) -> None:
        self._module = module
        self._capacity = {layer.fqn: layer.live_capacity for layer in layers if layer.live_capacity is not None}
        self._extra = {layer.fqn: layer.extra for layer in layers if layer.extra is not None}
        self._graphs = [place for layer in layers for place in layer.graphs]
        own = nn.Module.get_extra_state
        self._modules = {fqn: each for fqn, each in module.named_modules() if type(each).get_extra_state is not own}
        require_storable({f"layer `{fqn}`, {what}": v for what, s in self.take().items() for fqn, v in s.items()})

    @property
    def attributes(self) -> set[tuple[str, str]]:
        """Plain attributes in the state, as (name of a module, attribute)."""
        return {place for v in (*self._capacity.values(), *self._extra.values()) for place in getattr(v, "places", ())}

    def take(self) -> dict[str, Any]:
        """Return the values, by kind and layer."""
        return {
            "capacity": {fqn: view.get(self._module) for fqn, view in self._capacity.items()},
            "extra": {fqn: copied(dict(extra.get(self._module))) for fqn, extra in self._extra.items()},
            "modules": {fqn: copied(_unwrapped(module.get_extra_state())) for fqn, module in self._modules.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write `state` into the layers."""
        for fqn, view in self._capacity.items():
            if fqn in state["capacity"]:
                view.set(self._module, state["capacity"][fqn])
        for fqn, extra in self._extra.items():
            if fqn in state["extra"]:
                extra.set(self._module, state["extra"][fqn])
        for fqn, value in state.get("modules", {}).items():
            if fqn in self._modules:
                self._modules[fqn].set_extra_state(BytesIO(value) if isinstance(value, bytes) else value)

    def follow(self, state: Mapping[str, Any]) -> None:
        """Write `state` into the layers in replay, where frozen routers may have led them astray."""
        self.restore(state)

    def drop_graphs(self) -> None:
        """Detach layers' tensors with an autograd graph."""
        for fqn, name in self._graphs:
            owner = self._module.get_submodule(fqn)
            value = getattr(owner, name, None)
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(owner, name, value.detach())
