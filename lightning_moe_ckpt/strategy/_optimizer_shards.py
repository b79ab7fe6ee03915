"""Give optimizers this rank's pieces of parameters, and their state dicts whole tensors as without shards.

A Lightning checkpoint holds the state of whole parameters, so any number of ranks, with sharded state or without, can load it.

Source: ZeRO (2020), Sec. 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError, UnsupportedOptimizer
from lightning_moe_ckpt.fit._limits import gradients_are_seen
from lightning_moe_ckpt.fit.loops import _port
from lightning_moe_ckpt.operators import StateSchema
from lightning_moe_ckpt.parallel import Gather, OptimizerShard, ParallelGroups, shard_of, stepped_of

log = rank_logger(__name__)

_READERS = ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad")


def shard_optimizers(
    optimizers: Iterable[Optimizer],
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    expert_parallel: Collection[str],
    groups: ParallelGroups,
    gather: Gather,
) -> dict[str, OptimizerShard]:
    """Replace parameters that train by this rank's pieces, in all groups and in state that exists. Return the shards by
    name; scalars, parameters on a single rank, and those without elements that follow each other in memory have none.

    Names in `expert_parallel` differ between expert-parallel ranks. Raises `ConfigurationError` if an optimizer does
    not update elements apart from each other, or changes weights between steps.
    """
    optimizers = list(optimizers)
    if groups.world_size == 1:
        return {}
    for optimizer in optimizers:
        _refuse(optimizer)
    trained = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    found: dict[str, OptimizerShard] = {}
    for name, param in named_parameters:
        ranks = groups.ranks("expert_data" if name in expert_parallel else "reduce")
        cuts = param.ndim > 0 and param.numel() > 0 and param.is_contiguous() and len(ranks) > 1
        if cuts and id(param) in trained and param.requires_grad:
            found[name] = OptimizerShard(param, ranks, groups.rank, gather)
    shards = {id(shard.whole): shard for shard in found.values()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [shards[id(p)].stepped if id(p) in shards else p for p in group["params"]]
        states = list(optimizer.state.items())
        optimizer.state.clear()
        for owner, state in states:
            shard = shards.get(id(owner))
            optimizer.state[owner if shard is None else shard.stepped] = state if shard is None else _cut(state, shard)
    return found


def gather_behind_steps(optimizer: Optimizer, shards: Mapping[str, OptimizerShard], gather: Gather) -> None:
    """Gather weights behind each step of an optimizer, before all other hooks, which see all ranks' weights."""

    def stepped(_: Optimizer, *__: Any) -> None:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        gather({name: shard for name, shard in shards.items() if id(shard.stepped) in params})

    hook = optimizer.register_step_post_hook(stepped)
    hooks = hook.hooks_dict_ref()
    assert hooks is not None, "the optimizer keeps its hooks"
    hooks.move_to_end(hook.id, last=False)


def tap_lightning(module: LightningModule, shards: Mapping[str, OptimizerShard]) -> list[Callable[[], None]]:
    """Let Lightning find parameters where an optimizer has pieces; return functions that remove the taps."""

    def follow(toggle: Callable[[], None]) -> None:
        for shard in shards.values():
            shard.stepped.requires_grad_(shard.whole.requires_grad)
        toggle()
        for shard in shards.values():
            shard.whole.requires_grad_(shard.stepped.requires_grad)

    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    finetuning = [each for each in callbacks if isinstance(each, BaseFinetuning)]
    taps = [_port.tap_finetuning(each, stepped_of) for each in finetuning]
    return taps if module.automatic_optimization else [*taps, *_port.tap_toggling(module, follow)]


def needs_whole_gradients(module: LightningModule) -> bool:
    """Return whether the user's code may read or keep gradients, which is logged once. Raises `ConfigurationError` if
    they would be unscaled in part.
    """
    if not (reader := _reader(module)):
        return False
    if getattr(module.trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigurationError(
            f"`shard_optimizer=True` under `16-mixed` unscales each rank's piece of a gradient only, and {reader} may read all of it. "
            "Use `bf16-mixed`, `shard_optimizer=False`, or no such code."
        )
    log.info("ranks gather all gradients at every step: %s may read them", reader, alike=True)
    return True


def _reader(module: LightningModule) -> str:
    if own := [hook for hook in _READERS if is_overridden(hook, module)]:
        return f"`{type(module).__qualname__}.{own[0]}`"
    if not module.automatic_optimization:
        return "manual optimization"
    return "a hook that is called with gradients" if gradients_are_seen(module.trainer, module, ()) else ""


def _refuse(optimizer: Optimizer) -> None:
    name, why = type(optimizer).__qualname__, ""
    if hasattr(optimizer, "consolidate_state_dict"):
        why = "shards its state itself"
    elif callable(getattr(optimizer, "eval", None)):
        why = "changes weights between steps (`eval`), which no rank would get from the others"
    else:
        try:
            reach = StateSchema.of(optimizer, in_parts=True).reach
            if reach.coupling != "element":
                why = f"updates elements of a {reach.coupling} together: {reach.shown}"
        except UnsupportedOptimizer as error:
            why = f"cannot be taken in parts: {error}"
    if why:
        raise ConfigurationError(
            f"`shard_optimizer=True` gives each rank a piece of every parameter to step, and `{name}` {why}. Use an optimizer such as "
            "AdamW, or `shard_optimizer=False`."
        )


def gather_shards(state: dict[str, Any], optimizer: Optimizer, groups: ParallelGroups) -> dict[str, Any]:
    """Return a state dict for whole parameters, from the optimizer's own with pieces, on the first rank that shares them. Collective."""
    if not (shards := _shards(optimizer)):
        return state  # of any form
    whole = dict(state["state"])
    for idx, shard in shards:
        entries = whole.get(idx, {})
        whole[idx] = {key: _gathered(v, shard, groups) if _is_piece(v, shard) else v for key, v in entries.items()}
        if not entries:
            del whole[idx]
    return {**state, "state": whole}


def cut_shards(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's pieces from a state dict for whole parameters."""
    if not (shards := _shards(optimizer)):
        return state
    pieces = dict(state["state"])
    for idx, shard in shards:
        if idx in pieces:
            pieces[idx] = _cut(pieces[idx], shard)
    return {**state, "state": pieces}


def _shards(optimizer: Optimizer) -> list[tuple[int, OptimizerShard]]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [(idx, shard) for idx, param in enumerate(params) if (shard := shard_of(param)) is not None]


def _cut(state: Mapping[str, Any], shard: OptimizerShard) -> dict[str, Any]:
    return {
        key: value.reshape(-1)[shard.start : shard.stop].clone()
        if isinstance(value, Tensor) and value.shape == shard.whole.shape and value.ndim
        else value
        for key, value in state.items()
    }


def _is_piece(value: Any, shard: OptimizerShard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.stepped.shape


def _gathered(piece: Tensor, shard: OptimizerShard, groups: ParallelGroups) -> Tensor:
    ranks, group = shard.ranks, groups.among(shard.ranks)
    sent = piece.new_zeros(shard.width)
    sent[: piece.numel()] = piece
    parts = [torch.empty_like(sent) for _ in ranks] if groups.rank == ranks[0] else None
    received = None if parts is None else [each.view(torch.uint8) for each in parts]
    dist.gather(sent.view(torch.uint8), received, dst=ranks[0], group=group)
    if parts is None:
        return piece
    return torch.cat([each.cpu() for each in parts])[: shard.whole.numel()].view(shard.whole.shape)
