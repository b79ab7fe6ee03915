"""Find the router that belongs to a group of experts: a sibling by name that emits one value per expert.

Order of registration differs between model families, so only name and shape count. The gate of a shared expert is no
router: it emits one value.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from lightning_moe_ckpt.operators._parameters import ParameterIndex, child_slots, join, own_parameters

_ROUTER = re.compile(r"(^|_)(router|gate|gates|gating|wg|classifier|switch)(_|$|\d)")
_NOT_ROUTER = re.compile(r"shared|proj")
_BIAS = re.compile(r"bias")
_MAX_CLIMB = 2


class Block(NamedTuple):
    """A module that holds a router and experts."""

    fqn: str
    router: tuple[str, ...]
    """Names of the router's parameters."""
    buffers: tuple[str, ...]
    """Names of the router's buffers."""


def find_block(root: nn.Module, experts_fqn: str, num_experts: int, index: ParameterIndex) -> Block | None:
    """Return the MoE block around a module of experts.

    Experts often sit in a wrapper (`experts.local_experts`), so two levels are searched, but only through modules
    that are called after experts.

    Returns:
        `None` if there is no router.
    """
    child_fqn = experts_fqn
    for _ in range(_MAX_CLIMB):
        if not child_fqn:
            return None
        block_fqn, _, child = child_fqn.rpartition(".")
        block = root.get_submodule(block_fqn)
        router = tuple(_router_params(block, block_fqn, child, num_experts, index))
        if router:
            return Block(block_fqn, router, find_router_buffers(block, block_fqn, num_experts, child))
        if "expert" not in block_fqn.rpartition(".")[2]:
            return None
        child_fqn = block_fqn
    return None


def find_router_module(root: nn.Module, block_fqn: str, num_experts: int) -> str | None:
    """Return the block's only module that emits one value per expert; `None` if there is none, or several."""
    found = [name for name, _ in _router_modules(root.get_submodule(block_fqn), num_experts, experts="")]
    return join(block_fqn, found[0]) if len(found) == 1 else None


def find_router_buffers(block: nn.Module, block_fqn: str, num_experts: int, experts: str = "") -> tuple[str, ...]:
    """Return buffers of the block's router, and the block's own that have a value per expert: biases, counters.

    Args:
        block: the MoE block.
        block_fqn: its name.
        num_experts: over all ranks.
        experts: name of the child that holds the experts.
    """
    names = [name for name, buffer in block.named_buffers(recurse=False) if buffer.numel() == num_experts]
    for child, module in _router_modules(block, num_experts, experts):
        names += [f"{child}.{name}" for name, _ in module.named_buffers()]
    return tuple(join(block_fqn, name) for name in names)


def find_router_beside(fqn: str, num_experts: int, index: ParameterIndex) -> tuple[str, ...]:
    """Return the parameters of routers that are siblings of the module `fqn`, where the block is not known."""
    parent = fqn.rpartition(".")[0]
    children = defaultdict[str, dict[str, nn.Parameter]](dict)
    for name, param in index.under(parent).items():
        child = name.removeprefix(f"{parent}.").partition(".")[0]
        if _is_router_name(child):
            children[child][name] = param
    emitting = [params for params in children.values() if _emitting(params.values(), num_experts)]
    return tuple(name for params in emitting for name in params)


def is_shared(fqn: str) -> bool:
    """Whether a module is an expert that every token visits; its wrapper may carry the name."""
    return any("shared" in part.lower() for part in fqn.split(".")[-2:])


def find_top_k(*modules: nn.Module) -> int | None:
    """Return the experts per token from the first of `modules` that has one of the usual attributes."""
    for module in modules:
        for attribute in ("top_k", "num_experts_per_tok", "moe_top_k"):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _router_params(
    block: nn.Module, block_fqn: str, experts: str, num_experts: int, index: ParameterIndex
) -> Iterator[str]:
    own = list(own_parameters(block).items())
    named = [(n, p) for n, p in own if _is_router_name(n) and num_experts in p.shape]
    modules = [child for _, child in _router_modules(block, num_experts, experts)]
    if not named and not modules:
        return
    # A correction bias beside the router steers the choice of experts: it belongs to it.
    biases = [(n, p) for n, p in own if _BIAS.search(n) and p.numel() == num_experts]
    named += [(n, p) for n, p in biases if join(block_fqn, n) in index.params]
    yield from dict.fromkeys(index.name(p) for _, p in named)
    for child in modules:
        yield from dict.fromkeys(index.name(p) for p in child.parameters())


def _router_modules(block: nn.Module, num_experts: int, experts: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in child_slots(block).items():
        if child is None or name == experts or not _is_router_name(name):
            continue
        if _emitting(child.parameters(), num_experts):
            yield name, child


def _is_router_name(name: str) -> bool:
    return bool(_ROUTER.search(name.lower())) and not _NOT_ROUTER.search(name.lower())


def _emitting(params: Iterable[nn.Parameter], num_experts: int) -> bool:
    return any(p.ndim == 2 and num_experts in p.shape for p in params)
