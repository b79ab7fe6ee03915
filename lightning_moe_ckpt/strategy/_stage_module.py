"""Define a LightningModule's hooks for pipeline stages, and refuse modules that cannot run in stages.

Lightning asks for `training_step`, `validation_step` and `configure_model`. A module cut into stages has other hooks in
their place, called by `MoEStrategy`, and needs nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import ParallelGroups

ATTRIBUTE = "stage"
"""Attribute for a stage that is not part of the LightningModule already."""

_STEPS = ("training_step", "validation_step", "test_step")

_built: WeakKeyDictionary[LightningModule, tuple[int, int, nn.Module]] = WeakKeyDictionary()
"""Stage index, number of stages and stage of each built module."""


class StagedModule(Protocol):
    """Hooks of a LightningModule under `MoEStrategy(pipeline_parallel=...)`."""

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Return one stage. Its parameters have their names in the whole model: no name is in two stages.

        Called in place of `configure_model`, when process groups exist. The result becomes `self.stage`, unless it is
        an attribute already.
        """

    def split_batch(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the first stage's inputs, a tensor or several, and the loss's target.

        Both are cut into micro-batches along their first dimension. Without this hook a batch has to be such a pair.
        """

    def stage_loss(self, output: Any, target: Tensor) -> Tensor:
        """Return one micro-batch's mean loss, on the last stage; in training and in validation, by `self.training`.

        Values logged here, or in `stage_auxiliary_loss`, are averaged over micro-batches and logged on all stages.
        """

    def stage_auxiliary_loss(self) -> Tensor | None:
        """Return this stage's addition to its latest micro-batch's loss, such as `l_aux` of its experts, or `None`.

        Without this hook nothing is added.
        """


def staged(module: LightningModule) -> StagedModule:
    """Return the module typed with its stage hooks. Raises `ConfigurationError` if a required hook is missing."""
    missing = [name for name in ("configure_stage", "stage_loss") if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigurationError(
            f"`MoEStrategy(pipeline_parallel=...)` needs `{type(module).__name__}.{missing[0]}`, which it does not have. "
            "See the section on pipeline stages of the documentation for the hooks of a module that is cut into stages."
        )
    return cast("StagedModule", module)


def stand_in(module: LightningModule, build: Callable[[], None], *, validates: bool) -> None:
    """Let Lightning find its steps, and call `build` in place of `configure_model`."""
    for name in _STEPS:
        # Without data, a `validation_step` would make Lightning warn.
        if not is_overridden(name, module) and (validates or name != "validation_step"):
            setattr(module, name, _never_called)
    module.configure_model = build  # type: ignore[method-assign]


def stand_out(module: LightningModule) -> None:
    """Undo `stand_in`."""
    vars(module).pop("configure_model", None)
    for name in _STEPS:
        if vars(module).get(name) is _never_called:
            delattr(module, name)


def build_stage(module: LightningModule, groups: ParallelGroups) -> None:
    """Make this rank's stage part of the module, once; averaging callbacks may ask before Lightning does."""
    known = _built.get(module)
    if known is not None and known[:2] == (groups.stage, groups.num_stages):
        return
    made = staged(module).configure_stage(groups.stage, groups.num_stages)
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"`{type(module).__name__}.configure_stage` returned {type(made).__name__}. Return the stage, an `nn.Module`."
        )
    if all(each is not made for each in module.modules()):
        setattr(module, ATTRIBUTE, made)
    _built[module] = groups.stage, groups.num_stages, made


def stage_of(module: LightningModule) -> nn.Module:
    """Return a built module's stage."""
    return _built[module][2]


def refuse_module(module: LightningModule) -> None:
    """Raise `ConfigurationError` for a module that no pipeline can run."""
    if not module.automatic_optimization:
        raise ConfigurationError(
            "`MoEStrategy(pipeline_parallel=...)` needs automatic optimization: a schedule runs forward and backward of all "
            "micro-batches together. Set `automatic_optimization = True`."
        )
    compiled = next((name for name, each in module.named_modules() if _is_compiled(each)), None)
    if compiled is not None:
        raise ConfigurationError(
            f"`{compiled or type(module).__name__}` is compiled, and torch.compile over a pipeline stage is not supported. "
            "Leave it out under `MoEStrategy(pipeline_parallel=...)`."
        )


def refuse_tied(module: LightningModule, exchange: Exchange) -> None:
    """Raise `ConfigurationError`, on every rank, if stages share parameters. Collective over the pipeline."""
    own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    stages = cast("list[list[str]]", exchange.gather_values(own))
    empty = [stage for stage, names in enumerate(stages) if not names]
    if empty:
        raise ConfigurationError(f"Stage {empty[0]} has no parameters. Give every stage some, or use fewer stages.")
    tied = [name for name, count in Counter(name for names in stages for name in names).items() if count > 1]
    if tied:
        where = [stage for stage, names in enumerate(stages) if tied[0] in names]
        raise ConfigurationError(
            f"`{tied[0]}`{f' and {len(tied) - 1} more' if len(tied) > 1 else ''}: stages {where} have a parameter of this name. "
            "Parameters tied across stages are not supported; if they are different ones, give them the names that they have in "
            "the whole model, such as the number of a block among all blocks."
        )


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _never_called(batch: Any, batch_idx: int) -> None:
    """Stand for a step that `MoEStrategy` takes."""
    raise RuntimeError("This step is taken by `MoEStrategy`, whose `pipeline_parallel` it stands for.")


def first_dimensions(inputs: Any) -> Iterator[int]:
    """Yield the lengths along which a stage's inputs are cut."""
    for each in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        if not isinstance(each, Tensor) or each.ndim == 0:
            raise ConfigurationError(
                f"`split_batch` returned {type(each).__name__} where a tensor with a first dimension was expected, along which "
                "it is cut into micro-batches."
            )
        yield each.shape[0]
