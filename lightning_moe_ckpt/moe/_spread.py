"""Spread stacked experts in Hugging Face models over expert-parallel ranks, in the model as it was built, or as it is built or loaded.

transformers has a module for a layer's experts. It is called with tokens, chosen experts and weights, and computes in one way or another
(`experts_implementation`). Here such a module keeps its name, its parameters keep their identity, and only this rank's rows stay in them. Its
class becomes a subclass. The new forward exchanges tokens as `MoELayer` does, without a capacity, and lets the family's own forward compute
the rows that arrive, each with a single expert and weight one. The token's rank applies the weights.

`from_pretrained` builds a model without memory, and maps the names in files to parameters; then it reads. In between, experts are
cut to this rank's rows, and entries for other ranks' experts are dropped: no rank reads them, or ever holds all experts. Experts that
the files do not have whole stay as they are: transformers draws their weights, or raises an error. Drawn experts are cut as soon as
their layer is drawn. All weights are therefore those of a single process, whatever the number of ranks.

Invariant: rank r in the group `expert` holds experts `[r * e, (r + 1) * e)`, with the values that the model was built with. (All ranks must
build equal models: seeded alike, or from one file.)

Source: Hugging Face transformers 5.23 (`integrations/moe.py`, `models/*/modeling_*.py`, `modeling_utils.py`, `core_model_loading.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe._dispatch import apply_everywhere, combine_rows, expert_group, gather_rows, plan_dispatch
from lightning_moe_ckpt.parallel import current_groups

log = rank_logger(__name__)

# Shape suffixes: T tokens on this rank, K top-k, E all experts, e experts on this rank, N slots sent, M rows received, D model dim.


class SpreadExperts(nn.Module):
    """Stacked experts that several ranks share; base for the classes that `spread_experts` derives from a family's own."""

    ep_size: int
    """Number of ranks that share the experts."""
    num_experts: int
    """Number of experts on this rank, as the family's own forward expects it."""
    local_expert_ids: range
    """Global indices of this rank's experts, in the order of dim 0."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the chosen experts, int64 `[T, K]` by global index, wherever they are, with weights `[T, K]`, to hidden
        states `[T, D]`; return as many, as precise. Collective over the group `expert`: ranks may hold different
        numbers of tokens, but all call forward equally often.
        """
        group = expert_group(self)
        dispatch = plan_dispatch(top_k_index, self.num_experts * self.ep_size, None)
        rows_ND = gather_rows(hidden_states, dispatch.slots, top_k_index.shape[-1])
        y_ND = apply_everywhere(rows_ND, dispatch.kept, group, self._own_experts)
        return combine_rows(y_ND, dispatch.slots, top_k_weights).to(hidden_states.dtype)

    def expert_parallel_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters, which have a row for each expert on this rank."""
        return self.named_parameters()

    def _own_experts(self, rows_MD: Tensor, per_expert: list[int]) -> Tensor:
        """Apply each expert on this rank to its rows, sorted by expert, in the way that the family does."""
        if not rows_MD.shape[0]:  # some ways leave parameters without a gradient then, others fail
            none_MD: Tensor = _Untouched.apply(rows_MD, *self.parameters())  # type: ignore[no-untyped-call]
            return none_MD
        number_e = torch.tensor(per_expert, device=rows_MD.device)
        expert_M = torch.repeat_interleave(number_e, output_size=rows_MD.shape[0])
        y_MD: Tensor = super().forward(rows_MD, expert_M[:, None], rows_MD.new_ones(rows_MD.shape[0], 1))
        return y_MD

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made when it is needed, so that pickle would not find it.
        return _new, (type(self).__mro__[2],), self.__dict__


class _Untouched(torch.autograd.Function):
    """Return no rows, and zeros as every parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = (torch.zeros_like(p) if need else None for p, need in zip(ctx.parameters, needed, strict=True))
        return grad, *zeros


def spread_experts(root: nn.Module) -> list[str]:
    """Keep this rank's experts only, in all modules with stacked experts from Hugging Face transformers; other modules stay.

    `MoEStrategy` calls it when a model has been built. Parameters on the meta device are cut as well. Modules that are spread already stay as they are.

    Returns:
        The modules that this call has spread, by name; none with one expert-parallel rank.

    Raises:
        ConfigurationError: transformers keeps experts that cannot be spread over so many ranks, or they were spread over another number.
    """
    groups, named = current_groups(), dict(root.named_modules())
    found = []
    for fqn, module in named.items():
        if isinstance(module, SpreadExperts):
            if module.ep_size != groups.ep_size:
                raise ConfigurationError(
                    f"`{fqn}` holds experts for `expert_parallel={module.ep_size}`, the strategy has "
                    f"`expert_parallel={groups.ep_size}`. Build the model anew."
                )
        elif groups.ep_size > 1 and _is_hugging_face(module):
            found.append(fqn)
    owners = _owners(named)
    for fqn in found:
        for reason in _refusals(fqn, named, owners, groups.ep_size):
            raise ConfigurationError(f"`{fqn}` ({type(named[fqn]).__name__}) {reason}")
    for fqn in found:
        keep_own_rows(named[fqn])
    if found:
        log.info("%d modules of experts spread over %d ranks each", len(found), groups.ep_size, alike=True)
    return found


def spreadable_experts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules, with their names, that `spread_experts` would cut and not refuse; none with one expert-parallel rank."""
    ep_size, named = current_groups().ep_size, dict(root.named_modules())
    owners = _owners(named)
    for fqn, module in named.items():
        whole = ep_size > 1 and _is_stacked(module) and not isinstance(module, SpreadExperts)
        if whole and not any(_refusals(fqn, named, owners, ep_size)):
            yield fqn, module


def _owners(named: dict[str, nn.Module]) -> Counter[int]:
    """Count the modules that have each parameter."""
    return Counter(id(p) for module in set(named.values()) for p in module._parameters.values())  # noqa: SLF001


def _is_hugging_face(module: nn.Module) -> bool:
    """Whether a module from transformers holds routed experts, in a way that can be spread or not."""
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.")]
    return _is_stacked(module) or any(name.endswith("Experts") and "Shared" not in name for name in names)


def _is_stacked(module: nn.Module) -> bool:
    """Whether transformers lets several implementations compute a module, and has told it how parameters are stacked."""
    return {"is_transposed", "has_bias"} <= vars(module).keys()


def _refusals(fqn: str, named: dict[str, nn.Module], owners: Counter[int], ep_size: int) -> Iterator[str]:
    """Yield reasons against spreading a module's experts, each with the remedy."""
    module = named[fqn]
    num_experts = getattr(module, "num_experts", 0)
    otherwise = "Use `expert_parallel=1`, or `MoELayer` in its place."
    if not _is_stacked(module):
        yield (
            f"keeps its experts in a way that `expert_parallel={ep_size}` cannot cut: wanted are stacked parameters, called with "
            f"tokens, chosen experts and weights. {otherwise}"
        )
    if getattr(module, "_is_expert_parallel", False):
        yield "is spread by transformers itself. Load the model without `distributed_config` and `tp_plan`."
    if hasattr(named[fqn.rpartition(".")[0]], "parameter_name"):
        yield (
            "is adapted by PEFT (`target_parameters`), whose matrices are for all experts. Use `expert_parallel=1`, or adapt "
            "other layers (`target_modules`)."
        )
    own = [p for p in module._parameters.values() if p is not None]  # noqa: SLF001
    rest = len([*module.parameters(), *module.buffers()]) - len(own)
    if rest or any(p.ndim == 0 or p.shape[0] != num_experts for p in own):
        yield f"has parameters or buffers beside those with a row for each of {num_experts} experts. {otherwise}"
    if any(owners[id(p)] > 1 for p in own):
        yield "shares parameters with another module. Untie them, or use `expert_parallel=1`."
    if num_experts % ep_size:
        yield (
            f"has {num_experts} experts, which `expert_parallel={ep_size}` ranks cannot share evenly. Choose a number of ranks "
            "that divides it."
        )


@torch.no_grad()
def keep_own_rows(module: Any) -> None:
    """Cut the experts of a module from `spreadable_experts` to those of this rank."""
    groups = current_groups()
    num_local = module.num_experts // groups.ep_size
    first = groups.ep_rank * num_local
    for parameter in module.parameters():
        # The same object: optimizers, hooks and lists that the user has made of it stay right.
        parameter.grad = None
        parameter.data = parameter.data[first : first + num_local].clone()
    module.__class__ = _spread_class(type(module))
    module.ep_size, module.num_experts = groups.ep_size, num_local
    module.local_expert_ids = range(first, first + num_local)


_classes: dict[type[nn.Module], type[SpreadExperts]] = {}


def _spread_class(family: type[nn.Module]) -> type[SpreadExperts]:
    """Return the subclass for a family's class, made once."""
    if family not in _classes:
        _classes[family] = type(f"Spread{family.__name__}", (SpreadExperts, family), {"__module__": family.__module__})
    return _classes[family]


def _new(family: type[nn.Module]) -> nn.Module:
    made = _spread_class(family)
    return made.__new__(made)


@contextmanager
def spread_while_loading() -> Iterator[None]:
    """Let transformers build and load models with this rank's experts alone, while the context lasts.

    Nothing changes with one expert-parallel rank. Experts that cannot be spread stay whole; `spread_experts` refuses them.
    """
    names = "transformers", "transformers.core_model_loading"  # the second since 5.0
    if current_groups().ep_size == 1 or not all(map(find_spec, names)):
        yield
        return
    from transformers import modeling_utils

    load = modeling_utils.convert_and_load_state_dict_in_model
    initialize = modeling_utils.PreTrainedModel._initialize_weights  # noqa: SLF001

    def load_rows(*, model: nn.Module, state_dict: dict[str, Any], load_config: Any, **kwargs: Any) -> Any:
        if load_config.hf_quantizer is None:
            state_dict = _own_entries(model, state_dict, load_config.weight_mapping or [])
        loaded = load(model=model, state_dict=state_dict, load_config=load_config, **kwargs)
        _let_go(model)
        return loaded

    def initialize_rows(model: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        initialize(model, module, *args, **kwargs)
        if "" in dict(spreadable_experts(module)):
            keep_own_rows(module)

    with ExitStack() as stack:
        stack.callback(_set(modeling_utils, "convert_and_load_state_dict_in_model", load_rows))
        stack.callback(_set(modeling_utils.PreTrainedModel, "_initialize_weights", initialize_rows))
        # It reserves memory on the device, for all experts.
        stack.callback(_set(modeling_utils, "caching_allocator_warmup", lambda *_: None))
        yield


def _set(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an attribute, and return the function that restores it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _own_entries(model: nn.Module, state_dict: Mapping[str, Any], weight_mapping: list[Any]) -> dict[str, Any]:
    """Spread the experts that files have whole, and return the entries without those for other ranks' experts. Entries,
    by their names in the files, are tensors or handles that read them when indexed; the model, as `from_pretrained`
    builds it, has no memory yet; `weight_mapping` is how transformers makes parameters of entries.
    """
    entries, num_spread = dict(state_dict), 0
    sources = _sources(model, state_dict, weight_mapping)
    for name, module in list(spreadable_experts(model)):
        shapes = {f"{name}.{own}": parameter.shape for own, parameter in module.named_parameters()}
        if not all(_has_whole(sources[own], shape, state_dict) for own, shape in shapes.items()):
            continue
        keep_own_rows(module)
        ids: range = module.local_expert_ids  # type: ignore[assignment]
        for keys in (keys for own in shapes for keys in sources[own].values()):
            if len(keys) == 1:
                entries[keys[0]] = _Rows(entries[keys[0]], slice(ids.start, ids.stop))
            else:
                for key in (*keys[: ids.start], *keys[ids.stop :]):
                    del entries[key]
        num_spread += 1
    if num_spread:
        log.info("%d modules of experts loaded spread over %d ranks", num_spread, current_groups().ep_size, alike=True)
    return entries


class _Rows:
    """Some experts of an entry that holds all of a layer; transformers reads them by `[...]`."""

    def __init__(self, entry: Any, rows: slice) -> None:
        self._entry, self._rows = entry, rows

    def __getitem__(self, _: object) -> Tensor:
        rows: Tensor = self._entry[self._rows]
        return rows


def _let_go(model: nn.Module) -> None:
    """Copy experts that are views of all experts in a file, if none was made for another precision: copies of a view are as large."""
    for module in model.modules():
        for parameter in module.parameters() if isinstance(module, SpreadExperts) else ():
            if parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()


def _has_whole(sources: Mapping[str | None, list[str]], shape: tuple[int, ...], state_dict: Mapping[str, Any]) -> bool:
    """Whether each source of a parameter has one entry per expert, or one entry for all experts."""
    for keys in sources.values():
        entries = [state_dict[key] for key in keys]
        found = [entry.shape if isinstance(entry, Tensor) else entry.get_shape() for entry in entries]
        stacked = len(keys) == 1 and len(found[0]) == len(shape) and found[0][0] == shape[0]
        if not stacked and (len(keys) != shape[0] or any(len(each) != len(shape) - 1 for each in found)):
            return False
    return bool(sources)


def _sources(
    model: nn.Module, state_dict: Mapping[str, Any], weight_mapping: list[Any]
) -> dict[str, dict[str | None, list[str]]]:
    """Return entries' names by parameter, and by the pattern that transformers converts them by, in the order of experts."""
    from transformers import core_model_loading

    copied = deepcopy(weight_mapping)  # some of them keep what they have met
    renamings = [each for each in copied if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in copied if isinstance(each, core_model_loading.WeightConverter)]
    found: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    wanted, prefix = model.state_dict(), model.base_model_prefix
    for key in sorted(state_dict, key=core_model_loading.dot_natural_key):
        name, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = core_model_loading.rename_source_key(key, [], [], prefix, wanted)
        found[name][pattern].append(key)
    return found
