"""Run data and expert parallelism under Lightning, with correct gradients, norms and checkpoints of experts.

`MoEStrategy` is a `DDPStrategy` without the DistributedDataParallel wrapper. Lightning still adds its distributed
sampler and launches processes, but `GradientReducer` reduces gradients; its results are bit-equal after restarts and
freezing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import duration, number_of_bytes
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.fit._callbacks import averaged_models
from lightning_moe_ckpt.fit.loops import _port
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.launch._network import await_listener
from lightning_moe_ckpt.moe import spread_experts
from lightning_moe_ckpt.operators import is_sharded, whole_of
from lightning_moe_ckpt.parallel import (
    GradientReducer,
    GroupAbort,
    OptimizerShard,
    ParallelGroups,
    broadcast_tensors,
    build_groups,
    closed_listeners,
    expert_parallel_fqns,
    expert_parallel_modules,
    global_grad_norm,
    init_fresh_process_group,
    set_current_groups,
    shares_agent_store,
    stepped_of,
)
from lightning_moe_ckpt.parallel._expert_parallel import zero_filled
from lightning_moe_ckpt.strategy._model_state import (
    BufferSync,
    gather_module_state,
    gather_optimizer_state,
    shard_module_state,
    shard_optimizer_state,
)
from lightning_moe_ckpt.strategy._optimizer_shards import (
    cut_shards,
    gather_behind_steps,
    gather_shards,
    needs_whole_gradients,
    shard_optimizers,
    tap_lightning,
)
from lightning_moe_ckpt.strategy._pipelined import PipelinedStrategy
from lightning_moe_ckpt.strategy._stage import check_module

log = rank_logger(__name__)

_FIRST_RANK_SECONDS = 60.0
_FORMING = timedelta(seconds=15)
"""Limit for making a process group under a supervisor, when all ranks have come; gloo may take it 5 times."""


class MoEStrategy(PipelinedStrategy):
    """Train Mixture-of-Experts models with data, expert and pipeline parallelism; also `Trainer(strategy="moe")`.

    Ranks are numbered by stage, then by data-parallel replica, then by expert-parallel rank.

    Args:
        expert_parallel: Number of ranks that share one set of experts; divides the number of processes of a stage.
            Modules that shard experts (`MoELayer`) must be built in `LightningModule.configure_model`. Stacked experts of
            Hugging Face models are spread over the ranks here, wherever the model is built.
        pipeline_parallel: Number of stages into which the model is cut; divides the number of processes. With several,
            the LightningModule has `configure_stage`, `split_batch` and `stage_loss` in place of `configure_model`,
            `training_step` and `validation_step`.
        micro_batches: Number of parts into which a batch is cut for the pipeline; divides the batch size. With
            ``"1f1b"`` at least the number of stages.
        schedule: ``"1f1b"`` keeps activations of at most as many micro-batches as there are stages, ``"gpipe"`` of all.
        localized_recovery: Whether only a dead rank's stage repeats steps, where this is exact; under `moe-ckpt run`. `None`
            (default): alone, except beside hooks inside a step; `False`: all stages go back to the newest generation.
        upstream_log_nbytes: Bytes of host memory per rank for copies of tensors across its stage's borders, from which
            neighbouring stages repeat; a number or text such as `4GiB`. If too small, all stages go back.
        gradient_reduction: ``"ordered"`` adds gradients in rank order, so a resumed run has the same bits as an
            uninterrupted run; ``"allreduce"`` leaves the order to the backend, faster on some networks, exact to
            rounding.
        shard_optimizer: Whether each of the ranks that share a parameter keeps the optimizer's state for a piece of it only, and
            gets the weights of all pieces behind each step (ZeRO-1): 1/N of the state, the same bits. The optimizer has flat pieces
            in place of parameters, and `param.grad` is set where hooks on gradients read it, at the cost of a message.
        bucket_nbytes: Bytes per message of the gradient reduction, a number or text such as `32MiB`.
        timeout: Limit for one collective operation: a `timedelta`, seconds, or text such as `10min`.
        process_group_backend: ``"gloo"`` or ``"nccl"``; by default the device's.
        start_method: How Lightning starts the processes if no launcher does.
        accelerator: Given by the Trainer.
        parallel_devices: Given by the Trainer.
        cluster_environment: Given by the Trainer.
        checkpoint_io: Given by the Trainer.
        precision_plugin: Given by the Trainer.
    """

    strategy_name = "moe"

    def __init__(
        self,
        *,
        expert_parallel: int = 1,
        pipeline_parallel: int = 1,
        micro_batches: int = 1,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        localized_recovery: bool | None = None,
        upstream_log_nbytes: int | str = 2**30,
        gradient_reduction: Literal["ordered", "allreduce"] = "ordered",
        shard_optimizer: bool = False,
        bucket_nbytes: int | str = 32 * 2**20,
        timeout: timedelta | float | str = timedelta(minutes=30),
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if expert_parallel < 1:
            raise ConfigurationError(f"`MoEStrategy(expert_parallel={expert_parallel})` must be one or more.")
        limit = duration(self, "timeout", timeout)
        super().__init__(
            pipeline_parallel=pipeline_parallel,
            micro_batches=micro_batches,
            schedule=schedule,
            localized_recovery=localized_recovery,
            upstream_log_nbytes=int(number_of_bytes(self, "upstream_log_nbytes", upstream_log_nbytes)),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=limit,
            start_method=start_method,
        )
        self.expert_parallel = expert_parallel
        self.gradient_reduction, self.shard_optimizer = gradient_reduction, shard_optimizer
        self.bucket_nbytes = int(number_of_bytes(self, "bucket_nbytes", bucket_nbytes))
        self.timeout: timedelta = limit
        self.last_grad_norm: Tensor | None = None
        """Norm of the last clipping by norm, before clipping; equal on all ranks."""
        self._buffer_sync: BufferSync | None = None
        self._names: dict[int, str] = {}
        self._sharded: set[str] = set()
        self._ignored: set[str] = set()
        self._shards: dict[str, OptimizerShard] = {}
        self._untap: list[Callable[[], None]] = []
        self._abort: GroupAbort | None = None

    # -- set-up ------------------------------------------------------------------------------------------------------

    @override
    def set_world_ranks(self) -> None:
        Supervised.from_environment()  # a spare waits here until it has a rank
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen" and self.num_processes * self.num_nodes == 1:
            assert self.cluster_environment is not None
            self._launcher = _port.OneProcess(self.cluster_environment, 1, 1)
        _port.keep_threads(self.launcher)

    @override
    def setup_distributed(self) -> None:
        if (supervised := Supervised.from_environment()) is not None and not dist.is_initialized():
            if supervised.replacement:
                self._require_fit(supervised)
                supervised.fits += 1
                # Without groups: the other ranks have run Lightning's collective setup, and do not repeat it.
                reset_seed()
                self.set_world_ranks()
                self._process_group_backend = self._get_process_group_backend()
                ep_size, num_stages = self._sizes
                self.groups = ParallelGroups.placed(
                    self.global_rank, self.world_size, ep_size=ep_size, num_stages=num_stages
                )
                set_current_groups(self.groups)
                return
            self._form_groups(supervised)
        if supervised is not None and self._fits:
            supervised.fits += 1
        self._join_fresh_store()
        with self._closed_listeners():
            super().setup_distributed()
        self.groups = _groups_of_this_process(self._sizes, self.timeout)
        set_current_groups(self.groups)
        log.info(
            "one of %d ranks; holds experts of rank %d of %d, in stage %d of %d",
            *(self.groups.world_size, self.groups.ep_rank, self.groups.ep_size),
            *(self.groups.stage, self.groups.num_stages),
        )

    @property
    def _sizes(self) -> tuple[int, int]:
        """Numbers of expert-parallel ranks and of stages."""
        return self.expert_parallel, self.pipeline_parallel

    # -- recovery in place, under a supervisor

    def reconnect(self, supervised: Supervised) -> None:
        """Join the other ranks in new process groups, and replace `groups` and all parts that hold groups. Collective."""
        if self.reducer is not None:
            self.reducer.close()
        self.reducer = self._buffer_sync = self._pipeline = None
        if self._abort is not None:
            self._abort.close([dist.group.WORLD, *self.groups.groups.values()])
        self.groups.groups.clear()  # remaining references lead to no group
        _built.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._form_groups(supervised)
        self.groups = _groups_of_this_process(self._sizes, self.timeout)
        set_current_groups(self.groups)
        self._require_same_fit(supervised.fits)
        self._start_reducing()

    def share_start(self, *, survived: bool) -> int:
        """Give processes that have not `survived` the state with which training began. Collective.

        Returns:
            The first rank that has survived, or 0.
        """
        everyone = Exchange(self.groups).gather_values(survived)
        dense, experts = self.groups.ranks("stage"), self.groups.ranks("expert_data")
        self._equalise_replicated(next((rank for rank in dense if everyone[rank]), dense[0]))
        self._equalise_experts(next((rank for rank in experts if everyone[rank]), experts[0]))
        return next((rank for rank, each in enumerate(everyone) if each), 0)

    @property
    def _fits(self) -> bool:
        return self._module.trainer.state.fn == TrainerFn.FITTING

    def _require_fit(self, supervised: Supervised) -> None:
        """Raise `CheckpointError` if this replacement's script does not begin with a fit, where the other ranks are."""
        if not self._fits:
            function = self._module.trainer.state.fn
            raise CheckpointError(
                f"This process takes the place of one that has died (incarnation {supervised.incarnation}), and its script "
                f"begins with `{function.value if function else None}`, which the other ranks do not do again. All ranks are "
                "started anew. Call `fit` before it to have the dead alone replaced."
            )

    def _require_same_fit(self, fits: int) -> None:
        """Raise `CheckpointError` if some ranks' scripts are in an earlier fit than other ranks'. Collective."""
        everyone = [row[0] for row in Exchange(self.groups).gather([fits])]
        if len(set(everyone)) > 1:
            raise CheckpointError(
                f"A new process is in its first fit, others are in fit {max(everyone)} of their script, which a process that "
                "joins them cannot skip to. All ranks are started anew, and find their first fits finished."
            )

    def _form_groups(self, supervised: Supervised) -> None:
        """Make the default group and all others, once all ranks have come; a failure breaks them."""
        environment = self.cluster_environment
        assert environment is not None
        limit = min(self.timeout, _FORMING)
        rank, world_size = environment.global_rank(), environment.world_size()
        self._abort = GroupAbort(world_size)
        with self._abort as abort:
            store = supervised.rejoin(self.timeout.total_seconds())
            store.set_timeout(limit)
            supervised.watch(abort.abort, lambda gone: self.step_guard is not None and self.step_guard.outlasts(gone))
            with self._closed_listeners():
                dist.init_process_group(self._backend, store=store, rank=rank, world_size=world_size, timeout=limit)
            groups = build_groups(self.expert_parallel, limit, num_stages=self.pipeline_parallel)
        for group in {dist.group.WORLD, *groups.groups.values()}:
            dist.distributed_c10d._set_pg_timeout(self.timeout, group)  # noqa: SLF001  # torch has no public way
        _built[self._sizes, self.timeout] = (dist.group.WORLD, groups)

    def _join_fresh_store(self) -> None:
        """Use a fresh store under torchrun: a restarted process must not read the previous one's addresses. Without, await rank 0's."""
        environment = self.cluster_environment
        if environment is None or dist.is_initialized():
            return
        if not shares_agent_store():
            if environment.node_rank() or environment.local_rank():
                await_listener(environment.main_address, environment.main_port, _FIRST_RANK_SECONDS)
            return
        rank, world_size = environment.global_rank(), environment.world_size()
        init_fresh_process_group(self._backend, rank=rank, world_size=world_size, timeout=self.timeout)

    @property
    def _backend(self) -> str:
        return self.process_group_backend or ("nccl" if self.root_device.type == "cuda" else "gloo")

    def _closed_listeners(self) -> AbstractContextManager[None]:
        """Return a context for making the default group: only ranks can connect, and the store stays reachable."""
        if (environment := self.cluster_environment) is None or self._backend != "gloo":
            return nullcontext()  # NCCL connects when it likes
        return closed_listeners(open_ports={environment.main_port})

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self._module
        if not is_sharded(module):  # which is refused below
            for root in (module, *averaged_models(trainer)):
                spread_experts(root)
        check_module(module, self.groups)
        self._check_stages(trainer)
        self._sharded = expert_parallel_fqns(module)
        self._ignored = ignored = _port.ignored_names(module) - self._sharded
        fits = trainer.state.fn == TrainerFn.FITTING
        # Outside of fits, Lightning makes states equal to rank 0's, and stages have no state in common.
        apart = set() if fits or self.pipeline_parallel == 1 else {n for n, _ in _port.named_states(module)}
        _port.ignore_names(module, ignored | self._sharded | apart)
        super().setup(trainer)
        if apart:
            _port.ignore_names(module, ignored | self._sharded)
            self.configure_ddp()
        self._names = {id(each): name for name, p in module.named_parameters() for each in (p, stepped_of(p))}
        if self.pipeline_parallel > 1 and fits:
            self._untap.append(_port.tap_zero_grad(trainer, self._hold_zero_grad))
        if self.apart:
            return
        self._equalise_experts(self.groups.ranks("expert_data")[0])
        if fits:
            self._start_reducing()

    @override
    def configure_ddp(self) -> None:
        """Make replicated states equal to the stage's first rank, without a wrapper."""
        if not self.apart:
            self._equalise_replicated(self.groups.ranks("stage")[0])

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self._shards = {}
        if self.shard_optimizer:
            reduced = ((name, p) for name, p in self._module.named_parameters() if name not in self._ignored)
            self._shards = shard_optimizers(
                self.optimizers, reduced, expert_parallel=self._sharded, groups=self.groups, gather=self._gather_weights
            )
            for optimizer in self.optimizers:
                gather_behind_steps(optimizer, self._shards, self._gather_weights)

    def _gather_weights(self, shards: Mapping[str, OptimizerShard]) -> None:
        assert self.reducer is not None
        self.reducer.pieces.gather_weights(shards)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self._remove_taps()
        self._untap = [
            _port.tap_clipping(self.precision_plugin, self._clip_by_norm),
            _port.tap_found_inf(self.precision_plugin, self._combine_found_inf, self.root_device),
        ]
        if self.pipeline_parallel > 1:
            self._untap.append(_port.tap_after_closure(self.precision_plugin, self._closure_ended))
        if self._shards:
            self._untap += tap_lightning(self._module, self._shards)

    @override
    def teardown(self) -> None:
        self._remove_taps()
        if self.reducer is not None:
            self.reducer.close()
        super().teardown()
        # The process groups stay: `trainer.save_checkpoint` after `fit` still needs every rank's experts.
        set_current_groups(None)

    def _equalise_replicated(self, source: int) -> None:
        module, ignored = self._module, _port.ignored_names(self._module)
        if self.groups.stage_size > 1:
            states = _port.named_states(module)
            broadcast_tensors((t for name, t in states if name not in ignored), self.groups.groups["stage"], source)

    def _equalise_experts(self, source: int) -> None:
        if self.groups.dp_size > 1 and self.groups.ep_size > 1:
            parameters = [p for name, p in self._module.named_parameters() if name in self._sharded]
            broadcast_tensors(parameters, self.groups.groups["expert_data"], source)

    def _start_reducing(self) -> None:
        module, ignored = self._module, self._ignored
        self._buffer_sync = BufferSync(module, ignored, self.groups) if self.groups.stage_size > 1 else None
        self.reducer = GradientReducer(
            ((name, parameter) for name, parameter in module.named_parameters() if name not in ignored),
            groups=self.groups,
            is_expert_parallel=self._sharded,
            shards=self._shards,
            whole_gradients=bool(self._shards) and needs_whole_gradients(module),
            bucket_nbytes=self.bucket_nbytes,
            mode=self.gradient_reduction,
            stage_flags=self._buffer_sync.flags if self._buffer_sync is not None else (),
        )

    # -- one step ----------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward, unless the schedule has, and reduce gradients before `on_after_backward`, as DDP does."""
        module = self._module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self.pipeline_parallel == 1:
            if self.reducer is not None:
                self.reducer.prepare(sync=not (module.automatic_optimization and _port.is_accumulating(module.trainer)))
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self._finish_reduction()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def grad_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the gradient norm over `parameters`, other ranks' experts and all stages. Collective, after reduction.

        Args:
            parameters: the same parameters on every rank of a stage, including those without a gradient.
            norm_type: as in `torch.nn.utils.clip_grad_norm_`.

        Returns:
            A scalar on the gradients' device, equal in bits on all ranks.
        """
        return self.upstream.answer(
            "norm",
            lambda: global_grad_norm(
                ((self._names.get(id(parameter), ""), stepped_of(parameter).grad) for parameter in parameters),
                expert_parallel=self._sharded,
                whole={name: shard.whole.numel() for name, shard in self._shards.items()},
                groups=self.groups,
                norm_type=norm_type,
                device=self.root_device,
            ),
        )

    def _finish_reduction(self) -> None:
        if self.reducer is None:
            return
        if self._buffer_sync is not None and self.reducer.armed:
            self.reducer.flags.update(self._buffer_sync.votes())
            self.reducer.finish()
            self._buffer_sync.apply(self.reducer.agreed)
        else:
            self.reducer.finish()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self.precision_plugin.main_params(optimizer))
        self.last_grad_norm = self.grad_norm(parameters)
        # A whole gradient, if there is one, has the piece's in its memory.
        wholes = [parameter if whole_of(parameter).grad is None else whole_of(parameter) for parameter in parameters]
        present = [each for each in wholes if each.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(present, clip_val, self.last_grad_norm)

    def _combine_found_inf(self, found_inf: Tensor) -> None:
        if (world := self.groups.group("world")) is not None:
            found_inf.copy_(self.upstream.answer("found_inf", lambda: _largest(found_inf.clone(), world)))

    def _remove_taps(self) -> None:
        for untap in self._untap:
            untap()
        self._untap = []

    # -- checkpoints of Lightning ------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with all experts and stages, on rank 0. Collective."""
        return gather_module_state(super().lightning_module_state_dict(), self._sharded_names, self.groups)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of a whole checkpoint. Raises `ConfigurationError` if it lacks parameters of Tutel's experts."""
        state = checkpoint["state_dict"]
        if self.pipeline_parallel > 1:
            own = self._module.state_dict().keys()
            state = {name: value for name, value in state.items() if name in own}
        if missing := zero_filled(self._module, state):
            raise ConfigurationError(
                f"The checkpoint lacks {len(missing)} parameters of Tutel's experts, such as `{missing[0]}`, which "
                "Tutel would load as zeros without an error. "
                "Take one that has all experts, or copy what it has by hand."
            )
        if self._sharded_names:
            local = dict(self._module.named_parameters(remove_duplicate=False))
            state = shard_module_state(state, local, self._sharded_names, self.groups)
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for all experts, on rank 0. Collective."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer  # noqa: SLF001
        own = super().optimizer_state(plain)
        if hasattr(plain, "consolidate_state_dict"):
            return own
        return gather_optimizer_state(plain, gather_shards(own, plain, self.groups), self._sharded_ids, self.groups)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states."""
        sharded, states = self._sharded_ids, list[dict[str, Any]]()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            states.append(cut_shards(shard_optimizer_state(state, optimizer, sharded, self.groups), optimizer))
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    @property
    def _sharded_names(self) -> set[str]:
        return expert_parallel_fqns(self._module)

    @property
    def _sharded_ids(self) -> set[int]:
        return {id(p) for _, own in expert_parallel_modules(self._module) for _, p in own.expert_parallel_parameters()}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `Trainer(strategy="moe")`, `"moe_spawn"` and `"moe_fork"`."""
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
            strategy_registry.register(
                cls.strategy_name + suffix,
                cls,
                description=f"Data and expert parallelism with `start_method` '{start_method}'",
                override=True,
                start_method=start_method,
            )


def _largest(found_inf: Tensor, world: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=world)
    return found_inf


_built: dict[tuple[tuple[int, int], timedelta], tuple[object, ParallelGroups]] = {}


def _groups_of_this_process(sizes: tuple[int, int], timeout: timedelta) -> ParallelGroups:
    """Return groups over the default process group, built once for all Trainers of this process. Collective."""
    world, groups = _built.get((sizes, timeout), (None, None))
    if groups is None or world is not dist.group.WORLD:
        groups = build_groups(sizes[0], timeout, num_stages=sizes[1])
        _built[sizes, timeout] = (dist.group.WORLD, groups)
    return groups
