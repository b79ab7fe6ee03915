"""Leave each rank its own experts while a Hugging Face model is built or loaded, so that no rank ever holds all of them.

`from_pretrained` builds a model without memory, and maps the names in files to parameters; then it reads. In between, experts are
cut to this rank's rows, and entries for other ranks' experts are dropped: no rank reads them. Experts that the files do not have
whole stay as they are: transformers draws their weights, or raises an error. Drawn experts are cut as soon as their layer is
drawn. All weights are therefore those of a single process, whatever the number of ranks.

Source: Hugging Face transformers 5.23 (`modeling_utils.py`, `core_model_loading.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.moe._spread import SpreadExperts, keep_own_rows, spreadable_experts
from lightning_moe_ckpt.parallel import current_groups

log = rank_logger(__name__)


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
