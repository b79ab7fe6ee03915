"""One training run, described by a value: what to train, on what, how, and with which checkpoint callback."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from door import Fit, digest
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric
from typing_extensions import Self, override

from campaign._data import make_loader, make_validation_loader
from campaign._emulated import emulated_device
from campaign._models import BiasedMoE, Counting, build
from campaign._optimizers import BLOCKS, OTHERS, make_other
from lightning_moe_ckpt.parallel import OrderedHookState, ordered_hook
from lightning_moe_ckpt.policies import Popularity
from lightning_moe_ckpt.testing import Attempt, Seam

Optimizer = str
"""`adamw`, `adamw_amsgrad`, `adamw_foreach`, `adamw_fused`, `adam` or `sgd`, or a name in `_optimizers.py`."""
Scheduler = Literal["none", "cosine", "epoch", "plateau"]
Schedule = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Which callback protects the run, and its arguments."""

    policy: Literal["dense", "sparse", "partial", "selective", "alternating", "differential"]
    every_n_steps: int = 1
    window: int | Literal["auto"] = 3
    budget_nbytes: int | None = None
    order: Literal["popularity", "fixed", "back_to_front"] = "fixed"
    popularity: Popularity | None = None
    schedule: Schedule | None = None
    k: int = 1
    snapshot_k: int | None = None
    select: Literal["sequential", "load_aware"] = "sequential"
    plt_budget: float | None = None
    local_budget: int | Literal["auto"] = "auto"
    remote_budget: int | Literal["auto"] = "auto"
    batch: int = 8
    keep: int = 2
    batches: Literal["reposition", "log"] = "reposition"
    url: str | None = None
    """In place of the campaign's folder; every run needs one of its own."""
    storage_options: tuple[tuple[str, Any], ...] = ()
    stutters: int = 0
    """Percent of all calls of storage that fail, in listings and readings as in writings: see `_stuttering.py`."""
    target: float | None = None
    """`overhead_target`; decisions begin with the first steps, and not after seconds of training."""
    at_least: float = 600.0
    """Seconds of `storage_at_least`."""
    stretched: bool = False
    """Whether the cost of windows may keep them apart, as it may where their distance is not the user's."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Further ones of the callback."""

    @property
    def most_repeated(self) -> int | None:
        """Most steps that a restart repeats where each window was taken; `None` if there is no such promise."""
        if self.stretched or self.policy in ("alternating", "differential") or self.schedule is not None:
            return None
        if self.policy == "sparse":
            return None if self.window == "auto" else 2 * self.window
        return self.every_n_steps + 1

    def make(self, url: str) -> Callback:
        from lightning_moe_ckpt import callbacks
        from lightning_moe_ckpt.policies import SparsePolicy
        from lightning_moe_ckpt.policies._policy import PeriodicPolicy
        from lightning_moe_ckpt.session._pacing import Governor

        for policy in (SparsePolicy, PeriodicPolicy) if self.stretched else ():
            Seam(module=policy.__module__, attribute=f"{policy.__name__}.bound", replacement="").apply()
        if self.target is not None:
            hasty = partial(Governor, least_seconds=0.0, least_steps=4)
            Seam(module="lightning_moe_ckpt.session._tiers", attribute="Governor", replacement=hasty).apply()

        # The parents of all lives have frozen the heap already; to find that out takes a sixth of a life.
        common: dict[str, Any] = {"storage_options": dict(self.storage_options) or None, "freeze_heap": False}
        common |= {"overhead_target": self.target, "storage_at_least": timedelta(seconds=self.at_least)}
        common |= dict(self.arguments)
        url = self.url or url
        if self.stutters:
            from campaign import _stuttering

            url = f"{_stuttering.StutteringFileSystem.protocol}://{url.removeprefix('file://')}"
            common["storage_options"] = {"share": self.stutters / 100, "seed": os.getpid()}
        if self.policy == "dense":
            return callbacks.DenseCheckpoint(url, every_n_steps=self.every_n_steps, keep=self.keep, **common)
        if self.policy == "differential":
            return callbacks.DifferentialCheckpoint(
                url, every_n_steps=self.every_n_steps, batch=self.batch, keep=self.keep, **common
            )
        if self.policy == "partial":
            return callbacks.PartialExpertCheckpoint(
                url,
                every_n_steps=self.every_n_steps,
                k=self.k,
                snapshot_k=self.snapshot_k,
                select=self.select,
                plt_budget=self.plt_budget,
                keep=self.keep,
                **common,
            )
        if self.policy == "alternating":
            from campaign._alternating import AlternatingCheckpoint

            return AlternatingCheckpoint(url, keep=self.keep, **common)
        if self.policy == "selective":
            return callbacks.SelectiveExpertCheckpoint(
                url,
                every_n_steps=self.every_n_steps,
                local_budget=self.local_budget,
                remote_budget=self.remote_budget,
                keep=self.keep,
                **common,
            )
        options = {"window": self.window, "budget_nbytes": self.budget_nbytes, "order": self.order, **common}
        if self.popularity is not None:
            options["popularity"] = self.popularity
        if self.schedule is not None:
            options["schedule"] = [list(slot) for slot in self.schedule]
        return callbacks.SparseCheckpoint(url, keep=self.keep, batches=self.batches, **options)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training run. The defaults are 2 epochs of 5 optimizer steps in one process."""

    model: Literal["lists", "batch_norm", "tied", "mixtral", "stacked", "layers", "counting", "biased", "dense"] = (
        "lists"
    )
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments of `build`."""
    checkpointing: Checkpointing | None = None
    loader: Literal["plain", "stateful"] = "plain"
    workers: int = 0
    augment: bool = True
    batches: int = 5
    """Per epoch and rank."""
    batch_size: int = 4
    epochs: int = 2
    accumulate: int = 1
    validate_every: int | None = 2
    """Batches between validations; `None` for no validation at all."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"] = "32-true"
    clip: float | None = 0.5
    clip_algorithm: Literal["norm", "value"] = "norm"
    optimizer: Optimizer = "adamw"
    scheduler: Scheduler = "cosine"
    epoch_metrics: bool = False
    """Whether the training loss is averaged over the epoch, by Lightning and by a metric of the module's own."""
    overflow_steps: tuple[int, ...] = ()
    """With 16-mixed: values of `global_step` at which one expert's gradient becomes infinite."""
    loss_scale: float = 2.0**14
    """With 16-mixed: the first one. From 2**24 on backward itself overflows, until so many steps are skipped that it does not."""
    expert_parallel: int = 1
    strategy: Literal["moe", "moe_fast", "ddp", "ddp_ordered"] = "moe"
    shard_optimizer: bool = False
    """Whether each rank has the optimizer's state for pieces of parameters only."""
    world_size: int = 1
    averaged: Literal["ema", "mean", "both"] | None = None
    """Running averages of the weights, by Lightning's callbacks; validation runs on them."""
    balanced_by: Literal["module", "callback"] | None = None
    """Who moves the router bias of the model `biased` after each batch."""
    bucket_nbytes: tuple[int, ...] = (2**25,)
    """Size of a reduction bucket in each life; the last one holds for all that follow."""
    emulated: bool = False
    """Whether snapshots go through the CUDA engine, on an emulated device."""

    @property
    def steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.epochs * math.ceil(self.batches / self.accumulate)

    def make_module(self, life: Attempt) -> Module:
        """What is trained."""
        return Module(self, life)

    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        """The user's own callbacks, besides the one that takes checkpoints."""
        balancing: list[Callback] = [Balancing()] if self.balanced_by == "callback" else []
        return [*balancing, *make_averaging(self.averaged)]

    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        """Training and validation data."""
        length = self.batches * self.batch_size * life.world_size
        training = make_loader(
            self.loader, length=length, batch_size=self.batch_size, workers=self.workers, augment=self.augment
        )
        return training, make_validation_loader(self.batch_size) if self.validate_every else None

    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        """Arguments of the Trainer, callbacks aside."""
        return {
            "accelerator": "cpu",
            "devices": life.world_size,
            "strategy": _strategy(self, life),
            "max_epochs": self.epochs,
            "accumulate_grad_batches": self.accumulate,
            "gradient_clip_val": self.clip,
            "gradient_clip_algorithm": self.clip_algorithm,
            "val_check_interval": self.validate_every,
            "limit_val_batches": 1.0 if self.validate_every else 0,
            "num_sanity_val_steps": 0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **_precision(self),
        }

    def before_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """What the user's program does between building the Trainer and training."""

    def fit_options(self, life: Attempt) -> dict[str, Any]:
        """Arguments of `fit` beside the module and the loaders."""
        return {}

    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        """What else must be equal at the end, besides the state of training; JSON."""
        kept = [callback for callback in trainer.callbacks if isinstance(callback, KeepsWeights)]  # type: ignore[attr-defined]
        return {"before the end": kept[0].weights} if kept and kept[0].weights else {}

    def fault_free(self) -> Self:
        """The same training with nothing that checkpoints or breaks it."""
        return replace(self, checkpointing=None, emulated=False)

    edits_weights: ClassVar[bool] = False
    """Whether a hook at the start of an epoch edits weights, and validation may come between two epochs."""

    def with_options(self, **options: Any) -> Setup:
        return replace(self, options=(*self.options, *options.items()))

    @property
    def fit(self) -> Fit:
        """What a life runs; picklable."""
        return partial(train, self)


class Module(LightningModule):
    """The model of a `Setup` under automatic optimization, built in `configure_model` so that it may be sharded."""

    def __init__(self, setup: Setup, life: Attempt) -> None:
        super().__init__()
        self._setup, self._life = setup, life
        self.model: torch.nn.Module | None = None
        self.mean_loss = MeanMetric() if setup.epoch_metrics else None

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = build(self._setup.model, **dict(self._setup.options))

    @override
    def on_fit_start(self) -> None:
        # From here on each rank draws its own numbers.
        torch.manual_seed(self._life.seed + 101 * self._life.rank)
        if self._setup.strategy == "ddp_ordered":
            # Lightning registers hooks on CUDA only.
            self.trainer.model.register_comm_hook(OrderedHookState(), ordered_hook)  # type: ignore[union-attr, operator]

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        assert self.model is not None
        logits_BSV, aux = self.model(batch[0])
        loss: Tensor = functional.cross_entropy(logits_BSV.float().flatten(0, 1), batch[1].flatten()) + 0.01 * aux
        return loss

    @override
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        if self.mean_loss is not None:
            self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
            self.mean_loss.update(loss.detach(), len(batch[0]))
        return loss

    @override
    def on_train_epoch_end(self) -> None:
        if self.mean_loss is not None:
            self.log("mean_loss", self.mean_loss.compute())
            self.mean_loss.reset()

    @override
    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        torch.rand(1)  # validation that draws numbers moves the generator for training
        loss = self._loss(batch)
        self.log("validation_loss", loss, batch_size=len(batch[0]))
        return loss

    @override
    def on_train_epoch_start(self) -> None:
        if isinstance(self.model, Counting):
            self.model.begin_epoch()

    @override
    def on_train_batch_end(self, *args: object) -> None:
        if self._setup.balanced_by == "module":
            balance(self)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self._setup.optimizer, self)
        if self._setup.scheduler == "none":
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(self._setup, optimizer)}


def balance(module: LightningModule) -> None:
    """Let every layer with a router bias move it."""
    for each in module.modules():
        if isinstance(each, BiasedMoE):
            each.balance()


class Balancing(Callback):
    """Moves router biases before a checkpoint callback, which Lightning runs last, looks at them."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        balance(pl_module)


class KeepsWeights(Callback):
    """Remembers digests of the weights and averages at the end of training, before averages take the weights' place."""

    def __init__(self, averaging: Sequence[WeightAveraging]) -> None:
        self._averaging = averaging
        self.weights: list[str] = []

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        models = [pl_module, *(each._average_model for each in self._averaging)]
        self.weights = [digest([*model.parameters(), *model.buffers()]) for model in models if model is not None]

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.weights:  # the run was found finished
            self.on_train_end(trainer, pl_module)


def make_averaging(kind: Literal["ema", "mean", "both"] | None) -> list[Callback]:
    """Lightning's callbacks, one that averages every step and buffers too, one that averages every other step."""
    if kind is None:
        return []
    averaging: list[WeightAveraging] = []
    if kind in {"ema", "both"}:
        averaging.append(EMAWeightAveraging(decay=0.8))
    if kind in {"mean", "both"}:
        averaging.append(EveryOther(use_buffers=False))
    return [KeepsWeights(averaging), *averaging]


class EveryOther(WeightAveraging):
    """The plain mean of the weights after steps 4, 6, 8..."""

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 3 and step_idx % 2 == 1


def overflow_one_expert(module: LightningModule, expert: int = 1) -> None:
    """Make one expert's gradient infinite, as an fp16 overflow inside it would; nothing if none is computed."""
    for name, parameter in module.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        if f".experts.{expert}." in name:
            parameter.grad.view(-1)[0] = float("inf")
        elif name.endswith(".w1"):  # stacked, one expert per row
            parameter.grad[expert].view(-1)[0] = float("inf")


def make_optimizer(name: Optimizer, module: LightningModule, *, only_trained: bool = False) -> torch.optim.Optimizer:
    """An optimizer with two groups, for matrices and for the rest, which differ in weight decay."""
    chosen = [parameter for parameter in module.parameters() if parameter.requires_grad or not only_trained]
    matrices = [parameter for parameter in chosen if parameter.ndim > 1]
    others = [parameter for parameter in chosen if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name in {**OTHERS, **BLOCKS}:
        return make_other(name, groups)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if name == "adam":
        return torch.optim.Adam(groups, lr=3e-3, foreach=False)
    kind = name.removeprefix("adamw_")
    return torch.optim.AdamW(
        groups, lr=3e-3, foreach=kind == "foreach", fused=kind == "fused", amsgrad=kind == "amsgrad"
    )


def make_scheduler(setup: Setup, optimizer: torch.optim.Optimizer) -> Any:
    """Warm-up and cosine per step, steps per epoch, or a plateau fed by every validation."""
    schedulers = torch.optim.lr_scheduler
    if setup.scheduler == "plateau":
        plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        return {
            "scheduler": plateau,
            "monitor": "validation_loss",
            "interval": "step",
            "frequency": setup.validate_every,
        }
    if setup.scheduler == "epoch":
        return {"scheduler": schedulers.StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}
    cosine = schedulers.LambdaLR(optimizer, _warm_up_and_cosine)
    return {"scheduler": cosine, "interval": "step"}


def _warm_up_and_cosine(step: int) -> float:
    return min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * min(step, 40) / 40))


def train(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    """Run `setup` in this process, from wherever its checkpoint callback finds it."""
    quiet()
    seed_everything(life.seed, verbose=False)
    own = [] if setup.checkpointing is None else [setup.checkpointing.make(life.url)]
    module = setup.make_module(life)
    trainer = Trainer(callbacks=life.callbacks(*setup.callbacks(life), *own), **setup.trainer_options(life))
    setup.before_fit(trainer, module)
    with emulated_device(life) if setup.emulated else nullcontext():
        trainer.fit(module, *setup.loaders(life), **setup.fit_options(life))
    return setup.returned(life, trainer)


def train_in_stages(setups: Sequence[Setup], life: Attempt) -> Mapping[str, Any]:
    """The first life runs the first setup, and so on; the last one is run by all that follow."""
    return train(setups[min(life.index, len(setups) - 1)], life)


def _precision(setup: Setup) -> dict[str, Any]:
    if setup.precision != "16-mixed":
        return {"precision": setup.precision}
    # Lightning turns 16-mixed on CPU into bf16-mixed; a plugin of our own keeps it, and grows often enough to matter.
    scaler = torch.amp.GradScaler("cpu", init_scale=setup.loss_scale, growth_interval=4)
    return {"plugins": [Overflowing(setup.overflow_steps, scaler)]}


class Overflowing(MixedPrecision):
    """fp16 in which one expert's gradient overflows in some steps.

    No hook of the module does it: replay leaves no gradient out where the user's hooks would find it missing.
    """

    def __init__(self, steps: Sequence[int], scaler: torch.amp.GradScaler) -> None:
        super().__init__("16-mixed", "cpu", scaler=scaler)
        self._steps = steps

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]  # as Lightning's
        loss = super().post_backward(tensor, module)
        if module.trainer.global_step in self._steps:
            overflow_one_expert(module)
        return loss


def _strategy(setup: Setup, life: Attempt) -> Any:
    if life.world_size == 1:
        return "auto"
    if setup.strategy in {"ddp", "ddp_ordered"}:
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    from lightning_moe_ckpt.strategy import MoEStrategy

    return MoEStrategy(
        expert_parallel=setup.expert_parallel,
        gradient_reduction="ordered" if setup.strategy == "moe" else "allreduce",
        shard_optimizer=setup.shard_optimizer,
        bucket_nbytes=setup.bucket_nbytes[min(life.index, len(setup.bucket_nbytes) - 1)],
    )


def quiet() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata calls what torch deprecates
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
