"""Requirements for a module under `MoEStrategy`."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loops import _port
from lightning_moe_ckpt.operators import is_sharded
from lightning_moe_ckpt.parallel import ParallelGroups, expert_parallel_fqns, expert_parallel_modules
from lightning_moe_ckpt.parallel._expert_parallel import refuse_tutel


def check_module(module: LightningModule, groups: ParallelGroups) -> None:
    """Raise `ConfigurationError` if a module would train wrongly in these groups."""
    if is_sharded(module):
        raise ConfigurationError(
            "`strategy='moe'` reduces whole gradients, and this module has parameters in shards (`fully_shard`, `parallelize_module`). "
            "Use `ModelParallelStrategy`, or leave parameters whole, and spread experts with `expert_parallel=`."
        )
    for name, layer in expert_parallel_modules(module):
        if layer.ep_size != groups.ep_size:
            raise ConfigurationError(
                f"`{name}` was built for `expert_parallel={layer.ep_size}`, the strategy has "
                f"`expert_parallel={groups.ep_size}`. Build it in `LightningModule.configure_model`, "
                "which runs once the strategy has set up its processes, not in `__init__`."
            )
    if groups.ep_size > 1 and not expert_parallel_fqns(module):
        experts = next((f"`{name}`" for name, _ in module.named_parameters() if "expert" in name.lower()), "no expert")
        raise ConfigurationError(
            f"`expert_parallel={groups.ep_size}` would have no effect: found {experts} with all experts on "
            "every rank, and no layer that shards them. Take a Hugging Face model whose experts are stacked, build `MoELayer`, "
            "or a module that keeps the contract `ExpertParallelModule`, in `LightningModule.configure_model`, or use "
            "`expert_parallel=1`."
        )
    reason = refuse_tutel(module, _port.ignored_names(module))
    if reason is not None:
        raise ConfigurationError(reason)
    if groups.ep_size > 1 and not module.automatic_optimization:
        raise ConfigurationError(
            "Expert parallelism needs automatic optimization: every backward of manual optimization would divide "
            "the experts' gradients again. Set `automatic_optimization = True` or `expert_parallel=1`."
        )
