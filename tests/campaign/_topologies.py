"""One training on changing numbers of ranks and in changing layouts, and its reference: Lightning's own files, carried over.

The model is one and the same under data, expert and pipeline parallelism, sharded optimizers and FSDP2. It draws no random numbers, and
every step has the same samples on every number of ranks: the global batch is constant, so batches per rank are not.

The reference has no checkpoint callback. A leg ends with `Trainer.save_checkpoint`; between legs the file is put into the form that
the next strategy loads, by names of parameters; the sampler of the next leg leaves out what the epoch has had.
"""

# Shape suffixes: B sequences, S places, T = B * S tokens, D model dim, V vocabulary.

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from door import Fit
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from stored._outages import stop_storing_after
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric, SumMetric
from typing_extensions import override

from campaign._campaign import Campaigns, checkpoints, memory_of_run
from campaign._data import VOCABULARY, Tokens, make_validation_loader
from campaign._training import Checkpointing, make_averaging, make_optimizer, quiet
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.strategy._model_state import STAGES
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill, Seam, differences
from lightning_moe_ckpt.testing._attempts import FIRST_SEED, _RunningAttempt, _Script

MODEL_DIM, NUM_EXPERTS, BLOCKS = 8, 4, 3


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is spread over ranks."""

    ranks: int
    experts: int = 1
    """Ranks that share one set of experts."""
    stages: int = 1
    zero: bool = False
    """Whether each rank's optimizer has a piece of every parameter only."""
    sharding: Literal["", "fsdp2"] = ""

    @property
    def replicas(self) -> int:
        """Ranks that see different data."""
        return self.ranks // self.stages

    def strategy(self) -> Any:
        """Return the strategy; FSDP2's writes whole files."""
        if self.sharding:
            from lightning.pytorch.strategies import ModelParallelStrategy

            return ModelParallelStrategy(self.ranks, 1, save_distributed_checkpoint=False)
        return MoEStrategy(
            expert_parallel=self.experts,
            pipeline_parallel=self.stages,
            micro_batches=max(2, self.stages) if self.stages > 1 else 1,
            shard_optimizer=self.zero,
        )

    def __str__(self) -> str:
        parts = [f"ep{self.experts}"] * (self.experts > 1) + [f"pp{self.stages}"] * (self.stages > 1)
        return "+".join([str(self.ranks), *parts, *["zero"] * self.zero, *[self.sharding] * bool(self.sharding)])


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A life of the run: where, and how it ends."""

    layout: Layout
    kill: Kill | None = None
    """`None` for the last one, which finishes."""
    checkpointing: Checkpointing | None = None
    """In place of that of the trip."""
    stores_until: int | None = None
    """Step behind which storage takes nothing any more."""
    changes: tuple[tuple[str, Any], ...] = ()
    """What this life sets otherwise than the trip."""


@dataclass(frozen=True, kw_only=True)
class Trip:
    """What is trained. The defaults are 3 epochs of 5 steps, twelve samples each."""

    checkpointing: Checkpointing
    samples: int = 60
    global_batch: int = 12
    epochs: int = 3
    accumulate: int = 1
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    clip: float | None = 0.5
    clip_algorithm: Literal["norm", "value"] = "norm"
    optimizer: str = "adamw"
    top_k: int = 1
    auxiliary: float = 0.01
    """Weight of the loss that balances experts, which is of the tokens of one rank."""
    hidden: int = 12
    """Rows of an expert's first matrix."""
    frozen: bool = False
    """Whether the first block does not train."""
    thaws_at: int | None = None
    """Step from which on the first block trains."""
    batch_norm: bool = False
    """Whether there is one behind the embedding, with running statistics."""
    counted: bool = False
    """Whether a metric of the module counts samples, and another one averages losses, over an epoch."""
    validated: bool = False
    keeps_files: bool = False
    dropout: float = 0.0
    """If above zero each rank draws its own numbers."""
    averaged: Literal["ema", "mean", "both"] | None = None
    one_process: Literal["moe", "auto"] = "moe"

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    @property
    def steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.epochs * self.steps_per_epoch

    def loader(self, layout: Layout, **options: Any) -> DataLoader[Any]:
        """Return the loader; the strategy decides about its sampler."""
        batch_size = self.global_batch // layout.replicas // self.accumulate
        options = options or {"shuffle": True}
        return DataLoader(Tokens(self.samples, augment=False), batch_size=batch_size, **options)

    def validation(self) -> Any:
        """Return the loader of validation, if there is any."""
        return make_validation_loader(4) if self.validated else None

    def trainer(self, layout: Layout, callbacks: Sequence[Callback], **options: Any) -> Trainer:
        alone = self.one_process == "auto" and layout == Layout(ranks=1)
        return Trainer(
            accelerator="cpu",
            devices=layout.ranks,
            strategy="auto" if alone else layout.strategy(),
            max_epochs=self.epochs,
            accumulate_grad_batches=self.accumulate,
            gradient_clip_val=self.clip,
            gradient_clip_algorithm=self.clip_algorithm,
            precision=self.precision,
            callbacks=[*callbacks],
            val_check_interval=2 if self.validated else None,
            limit_val_batches=1.0 if self.validated else 0,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )


class Block(nn.Module):
    """Experts on a residual stream."""

    def __init__(self, trip: Trip) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL_DIM)
        self.moe = MoELayer(MODEL_DIM, trip.hidden, NUM_EXPERTS, top_k=trip.top_k)

    @override
    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = x_BSD + self.moe(self.norm(x_BSD))
        return y_BSD


class Part(nn.Module):
    """Some of the blocks, by their number in the whole model; embedding and head at its ends."""

    def __init__(self, stage: int, num_stages: int, trip: Trip) -> None:
        super().__init__()
        cuts = [-(-BLOCKS * i // num_stages) for i in range(num_stages + 1)]
        self.embed = nn.Embedding(VOCABULARY, MODEL_DIM) if stage == 0 else None
        self.running = nn.BatchNorm1d(MODEL_DIM) if trip.batch_norm and stage == 0 else None
        self.dropout = nn.Dropout(trip.dropout)
        self.blocks = nn.ModuleDict({str(i): Block(trip) for i in range(cuts[stage], cuts[stage + 1])})
        self.head = nn.Linear(MODEL_DIM, VOCABULARY) if stage == num_stages - 1 else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        x_BSD = x if self.embed is None else self.dropout(self.embed(x))
        if self.running is not None:
            x_BSD = self.running(x_BSD.flatten(0, 1)).view(x_BSD.shape)
        for block in self.blocks.values():
            x_BSD = block(x_BSD)
        return x_BSD if self.head is None else self.head(x_BSD).clone()  # FSDP2 warns of views


class Travelling(LightningModule):
    """The module of a `Trip`, in any layout."""

    def __init__(self, trip: Trip, layout: Layout) -> None:
        super().__init__()
        self._trip, self._layout = trip, layout
        self.stage: Part | None = None
        if trip.counted:
            self.samples, self.mean_loss = SumMetric(), MeanMetric()

    @override
    def configure_model(self) -> None:
        if self.stage is not None:
            return
        self.stage = self.configure_stage(0, 1)
        if self._layout.sharding:
            mesh: Any = self.device_mesh
            for block in self.stage.blocks.values():
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.stage, mesh=mesh["data_parallel"])

    def configure_stage(self, stage: int, num_stages: int) -> Part:
        made = Part(stage, num_stages, self._trip)
        if (self._trip.frozen or self._trip.thaws_at is not None) and "0" in made.blocks:
            made.blocks["0"].requires_grad_(False)
        return made

    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.float().flatten(0, 1), target.flatten())

    def stage_auxiliary_loss(self) -> Tensor:
        losses = [
            module.l_aux for module in self.modules() if isinstance(module, MoELayer) and module.l_aux is not None
        ]
        return self._trip.auxiliary * torch.stack(losses).sum()

    @override
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        assert self.stage is not None
        loss = self.stage_loss(self.stage(batch[0]), batch[1]) + self.stage_auxiliary_loss()
        if self._trip.counted:
            self.samples.update(len(batch[0]))
            self.mean_loss.update(loss.detach(), len(batch[0]))
        return loss

    @override
    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        assert self.stage is not None
        loss = self.stage_loss(self.stage(batch[0]), batch[1])
        self.log("validation_loss", loss, batch_size=len(batch[0]), sync_dist=True)
        return loss

    @override
    def on_fit_start(self) -> None:
        if self._trip.dropout:
            torch.manual_seed(101 * self.global_rank)

    @override
    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if self._trip.thaws_at is not None and self.trainer.global_step >= self._trip.thaws_at:
            self.requires_grad_(True)

    @override
    def on_train_epoch_end(self) -> None:
        if self._trip.counted:
            told = {"samples": float(self.samples.compute()), "mean_loss": float(self.mean_loss.compute())}
            print("at the end of the epoch:", json.dumps(told), flush=True)
            self.samples.reset()
            self.mean_loss.reset()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self._trip.optimizer, self)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_and_cosine)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _warm_up_and_cosine(step: int) -> float:
    return min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * min(step, 40) / 40))


class Notes(Callback):
    """Writes down the step that training begins with."""

    def __init__(self, life: Attempt) -> None:
        self._path = begun_path(life.workdir, life.index, life.rank)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if not self._path.exists():  # attributes are restored
            self._path.write_text(str(trainer.global_step))


class KeepsFiles(Callback):
    """Saves Lightning's own file before the first step of a life and behind each."""

    def __init__(self, life: Attempt) -> None:
        self._life = life

    def _save(self, trainer: Trainer) -> None:
        path = kept_file(self._life.workdir, self._life.index, trainer.global_step)
        if not trainer.strategy.broadcast(path.exists()):
            trainer.save_checkpoint(path)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._save(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._save(trainer)


def kept_file(workdir: Path, index: int, step: int) -> Path:
    """Return the file of a life of the run that has the state of a step."""
    return workdir / f"life{index}.step{step}.ckpt"


def begun_path(workdir: Path, index: int, rank: int = 0) -> Path:
    """Return the file that holds the step with which a life of the run began."""
    return workdir / f"begun{index}.rank{rank}"


def travel(trip: Trip, legs: Sequence[Leg], life: Attempt) -> Mapping[str, Any]:
    """Train a leg with the checkpoint callback."""
    quiet()
    seed_everything(life.seed, verbose=False)
    leg = legs[life.index]
    trip = replace(trip, **dict(leg.changes))
    if leg.stores_until is not None:
        stop_storing_after(leg.stores_until)
    own = (leg.checkpointing or trip.checkpointing).make(life.url)
    files = [KeepsFiles(life)] if trip.keeps_files else []
    callbacks = life.callbacks(Notes(life), *files, *make_averaging(trip.averaged), own)
    trainer = trip.trainer(leg.layout, callbacks)
    trainer.fit(Travelling(trip, leg.layout), trip.loader(leg.layout), trip.validation())
    return {}


# -- the reference


class Ends(Callback):
    """Saves Lightning's file behind a step, and ends training there."""

    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_last_batch:  # Lightning counts the epoch of such a file twice
            self._end(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        if trainer.global_step == self._step and not trainer.should_stop:
            trainer.save_checkpoint(self._path)
            trainer.strategy.barrier()
            trainer.should_stop = True


class LeavesOut(DistributedSampler[Any]):
    """Lightning's sampler without the samples of the first epoch that were seen before."""

    def __init__(self, *args: Any, epoch: int, seen: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._first, self._seen = epoch, seen

    @override
    def __iter__(self) -> Any:
        whole = list(super().__iter__())
        return iter(whole[self._seen :] if self.epoch == self._first else whole)


def carry(trip: Trip, layouts: Sequence[Layout], stops: Sequence[int], seed: int, life: Attempt) -> Mapping[str, Any]:
    """Train a leg of the reference: from the file of the one before to a stop, and from the last one to the end."""
    quiet()
    seed_everything(seed, verbose=False)
    layout, options = layouts[life.index], {}
    loader, source = trip.loader(layout), None
    if life.index:
        source = life.workdir / f"in{life.index}.ckpt"
        epoch, steps = divmod(stops[life.index - 1], trip.steps_per_epoch)
        position = {"num_replicas": layout.replicas, "rank": life.rank % layout.replicas}
        seen = steps * trip.global_batch // layout.replicas
        sampler = LeavesOut(loader.dataset, **position, seed=seed, epoch=epoch, seen=seen)
        loader, options = trip.loader(layout, sampler=sampler), {"use_distributed_sampler": False}
    end = [Ends(stops[life.index], life.workdir / f"out{life.index}.ckpt")] if life.index < len(stops) else []
    trainer = trip.trainer(layout, life.callbacks(*make_averaging(trip.averaged), *end), **options)
    trainer.fit(Travelling(trip, layout), loader, trip.validation(), ckpt_path=source, weights_only=False)
    return {}


def put_into_form(trip: Trip, workdir: Path, index: int, was: Layout, now: Layout) -> None:
    """Number the optimizer's state of a whole file as the next layout's strategy does, by names."""
    file = torch.load(workdir / f"out{index - 1}.ckpt", weights_only=False)
    (state,) = file["optimizer_states"]
    whole = _named(trip, state, was)
    if file["global_step"] == 0:
        # FSDP2 makes state by a step of its own, which it then counts, in saving and in loading.
        zeros = {name: torch.zeros_like(value) for name, value in file["state_dict"].items()}
        empty = {
            name: {"step": torch.tensor(0.0), "exp_avg": value, "exp_avg_sq": value} for name, value in zeros.items()
        }
        whole["state"] = empty if now.sharding else {}
    file["optimizer_states"] = [_numbered(trip, whole, now)]
    torch.save(file, workdir / f"in{index}.ckpt")


def state_by_name(trip: Trip, path: Path, layout: Layout) -> dict[str, Tensor]:
    """Return weights and the optimizer's state of a whole file, by name of the parameter and of the state."""
    file = torch.load(path, weights_only=False)
    (state,) = file["optimizer_states"]
    named = _named(trip, state, layout)["state"]
    moments = {f"{name} {key}": value for name, values in named.items() for key, value in values.items()}
    return {**file["state_dict"], **moments}


def _names(trip: Trip, layout: Layout, stage: int) -> list[list[str]]:
    """Return names by group of the optimizer."""
    module = Travelling(trip, layout)
    module.stage = module.configure_stage(stage, layout.stages)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [names[id(parameter)] for parameter in group["params"]]
        for group in make_optimizer(trip.optimizer, module).param_groups
    ]


def _named(trip: Trip, state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the whole state by name, and the groups' options."""
    named: dict[str, Any] = {}
    for stage, part in enumerate(state.get(STAGES, [state])):
        order = [name for group in _names(trip, layout, stage) for name in group]
        if layout.sharding:  # FSDP2 numbers by the model
            module = Travelling(trip, layout)
            module.stage = module.configure_stage(0, 1)
            order = [name for name, _ in module.named_parameters()]
        named |= {order[number]: values for number, values in part["state"].items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return {"state": named, "groups": groups}


def _numbered(trip: Trip, whole: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    stages = []
    for stage in range(layout.stages):
        members = _names(trip, layout, stage)
        number: dict[str, Any] = {name: i for i, name in enumerate(chain.from_iterable(members))}
        if layout.sharding:
            number = {name: name for name in number}
        groups = [
            {**options, "params": [number[name] for name in group]}
            for options, group in zip(whole["groups"], members, strict=True)
        ]
        state = {number[name]: values for name, values in whole["state"].items() if name in number}
        stages.append({"state": state, "param_groups": groups})
    if layout.stages == 1:
        return stages[0]
    return {STAGES: stages, "param_groups": stages[0]["param_groups"], "state": {}}


# -- runs


def run_legs(
    fit: Fit,
    layouts: Sequence[Layout],
    kills: Sequence[Kill | None],
    between: Any = None,
    *,
    url: str,
    workdir: Path,
    timeout: float = 60.0,
    seams: Sequence[Seam] = (),
) -> list[AttemptResult]:
    """Run a life in each layout, one after the other; `between(index)` comes before each but the first."""
    workdir.mkdir(parents=True, exist_ok=True)
    lives = []
    for index, (layout, kill) in enumerate(zip(layouts, kills, strict=True)):
        if index and between is not None:
            between(workdir, index)
        script = _Script(
            fit=fit, url=url, workdir=workdir, world_size=layout.ranks, timeout=timeout, seams=tuple(seams)
        )
        lives.append(_RunningAttempt(script, index, kill).run())
    return lives


@dataclass(frozen=True, kw_only=True)
class _Forms:
    """Puts the reference's file into the form of the next layout."""

    trip: Trip
    layouts: tuple[Layout, ...]

    def __call__(self, workdir: Path, index: int) -> None:
        put_into_form(self.trip, workdir, index, *self.layouts[index - 1 : index + 1])


def reference(
    campaigns: Campaigns, trip: Trip, layouts: Sequence[Layout], stops: Sequence[int], *, seeded_by: int = 0
) -> AttemptResult:
    """Return the last life of the run that Lightning's files carry from layout to layout.

    Args:
        campaigns: those of the test.
        trip: what is trained.
        layouts: of each leg.
        stops: steps of the files.
        seeded_by: number of the life whose seed the run has.
    """
    plain = replace(trip, checkpointing=Checkpointing(policy="dense"))
    key = f"Trip-{abs(hash((plain, tuple(layouts), tuple(stops), seeded_by))):x}"
    folder = campaigns._references / key  # shared by all tests of the session
    layouts = tuple(layouts)
    last = len(layouts) - 1
    if not (folder / f"attempt{last}.rank0.returned").exists():
        fit = partial(carry, trip, layouts, tuple(stops), FIRST_SEED + 7919 * seeded_by)
        forms = _Forms(trip=trip, layouts=layouts)
        kills = [None] * len(layouts)
        campaigns._warm.call(run_legs, fit, layouts, kills, forms, url="", workdir=folder)
    return AttemptResult(index=last, outcome="finished", seconds=0.0, world_size=layouts[last].ranks, workdir=folder)


@dataclass(frozen=True)
class Journey:
    """Lives of an elastic run."""

    lives: list[AttemptResult]
    begun: list[int]
    """Step with which each life began, or `NOT_BEGUN`."""

    @property
    def log(self) -> str:
        """What rank 0 of the last life said."""
        return self.lives[-1].log()

    def lineage(self) -> list[int]:
        """Return the lives that the last one's state comes from, oldest first: the first one began from nothing."""
        found = [re.search(_BEGINS, life.log()) for life in self.lives]
        by_number = {int(match[1]): index for index, match in enumerate(found) if match}
        chain, at = [], found[-1]
        while at is not None:
            chain.append(by_number[int(at[1])])
            at = found[by_number[int(at[2])]] if at[2] else None
        return chain[::-1]


NOT_BEGUN = -1
"""In the place of a step, of lives that were killed before their first batch."""
_BEGINS = re.compile(r"incarnation (\d+) begins from (?:nothing|step \d+ \(incarnation (\d+)\))")


def run_trip(campaigns: Campaigns, trip: Trip, *legs: Leg, between: Any = None, **options: Any) -> Journey:
    """Run the legs over one URL."""
    folder = campaigns._folder()
    fit = partial(travel, trip, legs)
    layouts, kills = [leg.layout for leg in legs], [leg.kill for leg in legs]
    arguments = {"url": checkpoints(folder).as_uri(), "workdir": folder, **options}
    lives = campaigns._warm.call(run_legs, fit, layouts, kills, between, **arguments)
    begun = [begun_path(folder, life.index) for life in lives]
    return Journey(lives, [int(path.read_text()) if path.exists() else NOT_BEGUN for path in begun])


def check_trip(campaigns: Campaigns, trip: Trip, *legs: Leg, **options: Any) -> Journey:
    """Run the legs, and require the end of the reference, by bits on each rank, and no shared memory left behind."""
    journey = run_trip(campaigns, trip, *legs, **options)
    lineage = journey.lineage()
    stops = [journey.begun[index] for index in lineage[1:]]
    for index in range(len(stops) - 1, 0, -1):  # what was stored before the first batch is of that step
        stops[index - 1] = stops[index] if stops[index - 1] == NOT_BEGUN else stops[index - 1]
    wanted = reference(campaigns, trip, [legs[index].layout for index in lineage], stops, seeded_by=lineage[0])
    require_same(wanted, journey)
    left = memory_of_run(checkpoints(journey.lives[0].workdir))
    assert not left, f"the finished run left {left} behind"
    return journey


def require_same(wanted: AttemptResult, journey: Journey) -> None:
    """Raise if weights, optimizer, rates or losses differ by a bit from those of the reference."""
    last, lines, ends = journey.lives[-1], list[str](), list[str]()
    for rank in range(last.world_size):
        seen = [{line["seen"]: line for line in life.records(rank, "train")} for life in (wanted, last)]
        for step in sorted(seen[0].keys() | seen[1].keys()):
            want, got = (each.get(step) for each in seen)
            if want is None or got is None or any(want[k] != got[k] for k in ("loss", "data", "lr", "step")):
                lines.append(f"rank {rank}, batch {step}: {got} instead of {want}")
        ends += [f"rank {rank}: {each}" for each in differences(*[compared(life.end(rank)) for life in (wanted, last)])]
    steps = [life.steps() for life in journey.lives]
    said = "".join(f"--- life {life.index} ---\n{life.log()}" for life in journey.lives)
    told = [
        "the run is not that of Lightning's files:",
        *lines[:5],
        *ends[:20],
        f"steps: {steps}, begun: {journey.begun}",
    ]
    assert not [*lines, *ends], "\n".join([*told, said])


def compared(end: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's file carries: no random state, and no order of entries."""
    return {key: value for key, value in end.items() if not key.startswith("rng/") and not key.endswith("/order")}
