"""Runs that a failure elsewhere aborts, and that go on in the same process.

In a world of one nobody else can fail. Here exceptions that the supervisor takes for another rank's failure are raised at
scripted places; a process never dies. Fault-free runs are the reference, as for runs that are killed.
"""

from __future__ import annotations

import importlib
import signal
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from door import HookPhase, JsonLines, bits
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric
from typing_extensions import Self, override

from campaign._models import ListMoE, StackedMoE
from campaign._supervised import shots_of
from campaign._training import Module, Setup, train
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.storage import RunStore
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import Attempt
from lightning_moe_ckpt.testing._kill import LatePhase, PhaseCallback, send_signal

CALLS: dict[str, tuple[str, str]] = {
    "open": ("lightning_moe_ckpt.recovery._opener", "RunOpener.open"),
    "join_tiers": ("lightning_moe_ckpt.session._opening", "_joined"),
    "load": ("lightning_moe_ckpt.session._session", "CheckpointSession._load"),
    "resume": ("lightning_moe_ckpt.fit._recorder", "BoundaryRecorder.resume"),
    "fit_start": ("campaign._in_place", "Traces.on_fit_start"),
    "sanity": ("lightning.pytorch.trainer.trainer", "Trainer._run_sanity_check"),
    "loaders": ("lightning.pytorch.loops.fit_loop", "_FitLoop.setup_data"),
    "position": ("lightning_moe_ckpt.fit.loaders._loaders", "skip_batches"),
    "train_start": ("campaign._in_place", "Traces.on_train_start"),
    "fetch": ("lightning.pytorch.loops.fetchers", "_PrefetchDataFetcher.__next__"),
    "generation_0": ("lightning_moe_ckpt.session._dense", "DenseCapture.begin"),
    "reconcile": ("lightning_moe_ckpt.session._session", "CheckpointSession.reconcile"),
    "optimizer": ("lightning.pytorch.strategies.strategy", "Strategy.optimizer_step"),
    "in_optimizer": ("torch.optim.adam", "_get_value"),  # once for each parameter
    "scaler": ("torch.amp.grad_scaler", "GradScaler.unscale_"),
    "clip": ("lightning.pytorch.plugins.precision.precision", "Precision.clip_gradients"),
    "boundary": ("lightning_moe_ckpt.session._session", "CheckpointSession.boundary"),
    "window": ("lightning_moe_ckpt.session._capture", "CaptureSession.open_window"),
    "capture": ("lightning_moe_ckpt.session._capture", "CaptureSession.capture"),
    "seal": ("lightning_moe_ckpt.session._capture", "CaptureSession.seal"),
    "hand_over": ("lightning_moe_ckpt.session._sealing", "Sealing._hand_over"),
    "condemn": ("lightning_moe_ckpt.session._session", "CheckpointSession.condemn"),
    "replayed": ("lightning_moe_ckpt.recovery._replay", "Replay.load"),
    "reduce": ("lightning_moe_ckpt.parallel._reducer", "GradientReducer._launch"),
    "agree": ("lightning_moe_ckpt.parallel._reducer", "GradientReducer._agree"),
    "commit": ("lightning_moe_ckpt.strategy._pipelined", "PipelinedStrategy.commit"),
    "schedulers": ("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop.update_lr_schedulers"),
    "compute": ("torchmetrics.aggregation", "MeanMetric.compute"),
    "file": ("lightning.pytorch.callbacks.model_checkpoint", "ModelCheckpoint._save_checkpoint"),
    "epoch_metrics": (
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector",
        "_LoggerConnector.update_train_epoch_metrics",
    ),
    "end": ("lightning_moe_ckpt.fit._run", "FitSession.end"),
    "stop": ("lightning_moe_ckpt.session._session", "CheckpointSession.stop"),
    "train_end": ("campaign._in_place", "Traces.on_train_end"),
}
"""Functions at whose begin or end a run is aborted."""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Where a run is aborted."""

    place: str
    """A phase of training, or a call of `CALLS`."""
    nth: int = 1
    """The how manyth time that this place is reached, counted from the abort before."""
    after: bool = False
    """Whether the call has returned."""


class Aborted(RuntimeError):
    """What an aborted collective raises."""


class _Script:
    """The aborts of this process; the supervisor that confirms them. Kept where no reset of the fit's objects reaches it."""

    replacement = False

    def __init__(self, aborts: Sequence[Abort]) -> None:
        self.left, self._reached, self._failed = list(aborts), 0, False
        self.on_recovery: Callable[[], None] | None = None

    def reach(self, place: str, *, after: bool = False) -> None:
        if not self.left or (self.left[0].place, self.left[0].after) != (place, after):
            return
        self._reached += 1
        if self._reached == self.left[0].nth:
            self._reached, self._failed = 0, True
            raise Aborted(f"{self.left.pop(0)}")

    def confirm(self, timeout: float) -> str | None:
        failed, self._failed = self._failed, False
        return "another rank has failed" if failed else None

    def beat(self, step: int) -> None:
        """Nobody watches."""

    def pause(self, *, aborted: bool = False) -> None:
        """Nobody watches."""

    def rejoin(self, timeout: float) -> None:
        """Nobody else is there."""
        if self.on_recovery is not None:
            self.on_recovery()


_scripts: list[_Script] = []


class _Aborter(PhaseCallback):
    @override
    def reached(self, trainer: Trainer, phase: HookPhase) -> None:
        _scripts[-1].reach(phase)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.unwatch_forward()
        self.watch_forward(trainer, pl_module)
        layers = [module for module in pl_module.modules() if isinstance(module, ListMoE | StackedMoE | MoELayer)]
        if layers:
            layers[-1].register_forward_hook(_reach_inside)


def _reach_inside(layer: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor] | Tensor) -> None:
    """In the midst of a forward pass, and when the backward pass comes by."""
    first = output if isinstance(output, Tensor) else output[0]
    if layer.training and first.requires_grad:
        _scripts[-1].reach("in_forward")
        first.register_hook(lambda _: _scripts[-1].reach("in_backward"))  # type: ignore[no-untyped-call]


def _aborting(place: str) -> None:
    """Let the script abort at a call."""
    module, dotted = CALLS[place]
    *path, name = dotted.split(".")
    owner = reduce(getattr, path, importlib.import_module(module))
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        _scripts[-1].reach(place)
        result = original(*args, **options)
        _scripts[-1].reach(place, after=True)
        return result

    setattr(owner, name, call)


def _storing_later(put_segment: Callable[..., Any], *args: Any) -> Any:
    if _scripts[-1].left:
        raise OSError("nothing is stored before the last abort")
    return put_segment(*args)


def train_in_place(
    setup: Setup,
    aborts: Sequence[Abort],
    life: Attempt,
    *,
    stores_later: bool = False,
    must_reach: bool = True,
    on_recovery: Callable[[Path], None] | None = None,
) -> Mapping[str, Any]:
    """Run `setup` in this process, which is aborted and goes on as often as the script says.

    With `stores_later` nothing arrives in storage before the last abort; with `must_reach` all places are come to. Before
    it goes on, `on_recovery` gets the folder of the run.
    """
    from lightning_moe_ckpt.callbacks import _base

    script = _Script(aborts)
    _scripts.append(script)
    if stores_later:
        put_segment = RunStore.put_segment
        RunStore.put_segment = lambda *args: _storing_later(put_segment, *args)  # type: ignore[method-assign]
    for place in {abort.place for abort in aborts} & CALLS.keys():
        _aborting(place)
    vars(_base)["supervisor"] = lambda _: script
    vars(_base)["can_rejoin"] = lambda _: True  # there is nobody to join
    script.on_recovery = partial(on_recovery, life.workdir) if on_recovery is not None else None
    aborter = _Aborter()
    returned = train(_WithCallbacks(setup, [aborter], [LatePhase(aborter)]), life)  # type: ignore[arg-type]
    print(f"aborted {len(aborts) - len(script.left)} times")
    assert not (must_reach and script.left), f"never came to {script.left}"
    return returned


# -- ranks that die there


@dataclass(frozen=True, kw_only=True)
class Shot:
    """Another rank that the supervisor ends, wherever it is then."""

    rank: int
    seconds: float = 0.0
    """How long after."""
    stops: bool = False


@dataclass(frozen=True, kw_only=True)
class Death:
    """Where a process of a rank dies, or stops."""

    rank: int
    at: Abort
    """Counted from the beginning of an incarnation: the first death is in the first one, and so on."""
    stops: bool = False
    shots: tuple[Shot, ...] = ()
    """Others that end when it comes there. Each ends an incarnation, too, in none of which anybody dies by itself."""
    survives: bool = False
    """Whether only the others end; it goes on when it knows of that."""

    @property
    def ends(self) -> list[tuple[int, bool]]:
        """Ranks that end, and whether it is because they stop."""
        own = [] if self.survives else [(self.rank, self.stops)]
        return [*own, *((shot.rank, shot.stops) for shot in self.shots)]


class _Dying(_Script):
    """Instead of an exception, a signal."""

    def __init__(self, deaths: Sequence[Death], life: Attempt) -> None:
        super().__init__([])
        nobody: list[Death | None] = [None]
        self._deaths = [each for death in deaths for each in [death, *nobody * (len(death.ends) - 1)]]
        self._rank, self._write = life.rank, JsonLines(life.records).write
        self._shoot = JsonLines(shots_of(life.workdir)).write
        self._incarnation = -1

    @override
    def reach(self, place: str, *, after: bool = False) -> None:
        supervised = Supervised.from_environment()
        incarnation = 0 if supervised is None else supervised.incarnation
        if incarnation != self._incarnation:
            self._incarnation, self._reached = incarnation, 0
            death = self._deaths[incarnation] if incarnation < len(self._deaths) else None
            self.left = [death.at] if death is not None and death.rank == self._rank else []
        try:
            super().reach(place, after=after)
        except Aborted:
            death = self._deaths[incarnation]
            assert death is not None
            for shot in death.shots:
                self._shoot(vars(shot))
            if death.survives:
                assert supervised is not None
                until = time.monotonic() + 1.0 + max(shot.seconds for shot in death.shots)
                while not supervised.failed and time.monotonic() < until:
                    time.sleep(0.001)
                return
            self._write({"kind": "killed", "phase": place})
            send_signal(signal.SIGSTOP if death.stops else signal.SIGKILL)


def train_and_die(
    setup: Setup, deaths: Sequence[Death], settle: Callable[[Attempt], None], life: Attempt
) -> Mapping[str, Any]:
    """Run `setup` in this process, which may be one that dies. `settle` is called before."""
    settle(life)
    _scripts.append(_Dying(deaths, life))
    for place in {death.at.place for death in deaths if death.rank == life.rank} & CALLS.keys():
        _aborting(place)
    aborter = _Aborter()
    return train(_WithCallbacks(setup, [aborter], [LatePhase(aborter)]), life)  # type: ignore[arg-type]


def no_place(life: Attempt) -> None:
    """Does nothing before a process trains."""


class _WithCallbacks:
    """A setup with further callbacks around its own."""

    def __init__(self, setup: Setup, first: list[Callback], last: list[Callback]) -> None:
        self._setup, self._first, self._last = setup, first, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._setup, name)

    def callbacks(self, life: Attempt) -> list[Callback]:
        return [*self._first, *self._setup.callbacks(life), *self._last]


# -- a run that leaves traces everywhere


class Tally:
    """An object of the user's that neither torch nor Lightning know."""

    __slots__ = ("__dict__", "slotted")

    def __init__(self) -> None:
        self.slotted = 0
        self.count, self.places, self.newest = Counter[str](), OrderedDict[str, int](), deque[int](maxlen=3)

    def note(self, what: str) -> None:
        self.slotted += 1
        self.count[what] += 1
        self.places[what] = self.slotted
        self.places.move_to_end(what)
        self.newest.append(self.slotted)

    def plain(self) -> list[Any]:
        return [self.slotted, dict(self.count), list(self.places.items()), list(self.newest), sorted(vars(self))]


class Traces(Callback):
    """Counts in attributes of every kind, with no `state_dict`: what begins anew after a restart, and what goes on."""

    def __init__(self) -> None:
        self.batches = self.starts = self.validations = 0
        self.tally = Tally()
        self.generator = np.random.default_rng(3)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts += 1
        self.tally.note("fit")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts += 10
        pl_module.model.register_forward_hook(scale)  # type: ignore[union-attr]
        next(pl_module.parameters()).register_hook(halve)  # type: ignore[no-untyped-call]

    @override
    def on_train_batch_end(self, *args: object) -> None:
        self.batches += 1
        self.generator.random()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations += 1

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            for name, parameter in pl_module.named_parameters():
                if name.endswith("bias"):
                    parameter.requires_grad_(False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.results = self.now(trainer, pl_module)  # type: ignore[assignment]

    def now(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """What has to be the same at the end."""
        return {
            "counters": [self.batches, self.starts, self.validations, module.counted],
            "logged": {name: bits(value) for name, value in sorted(trainer.callback_metrics.items())},
            "shown": sorted(trainer.progress_bar_metrics),
            "draws": self.generator.random(2).tolist(),
            "grads": [name for name, parameter in module.named_parameters() if parameter.grad is not None],
            "hooks": len(module.model._forward_hooks),  # type: ignore[union-attr]
            "modes": [each.training for each in module.modules()],
            "attributes": sorted(vars(module).keys() - {"training_step"}),
        }


def halve(gradient: Tensor) -> Tensor:
    """A hook of the user's on a parameter."""
    return gradient / 2


def scale(module: torch.nn.Module, inputs: object, output: Any) -> Any:
    """A hook of the user's on a model, which returns logits and an auxiliary loss."""
    return output[0] * 1.01, output[1]


class Begun(Callback):
    """Counts what no journal has, from the fit's begin, and says it is too much where steps count twice."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.tally, self.sums, self.array = Tally(), torch.zeros(2), np.zeros(2)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        seen = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.seen.append(seen)
        self.tally.note(f"batch {batch_idx}")
        self.sums += 1
        self.array += 1
        number = len(self.seen)
        assert self.seen == sorted(set(self.seen)), f"batches of another incarnation are in {self.seen}"
        assert [self.tally.slotted, int(self.sums[0]), int(self.array[1])] == [number] * 3
        assert sum(self.tally.count.values()) == number
        assert len(self.tally.newest) == min(3, number)
        assert not hasattr(pl_module, "results"), "an attribute of an aborted end is left"


class TracesModule(Module):
    """Metrics of every kind, a counter, and dropout."""

    def __init__(self, setup: Setup, life: Attempt) -> None:
        super().__init__(setup, life)
        self.counted = 0
        self.results: dict[str, Any]
        self.most, self.steps = MaxMetric(), MeanMetric()
        self.means = torch.nn.ModuleDict({"steps": self.steps})

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.counted += 1
        self.most.update(loss.detach())
        self.steps(loss.detach())
        self.log("most", self.most, on_step=True, on_epoch=True)
        self.log("mean", self.steps, on_step=False, on_epoch=True, prog_bar=True)
        self.log("summed", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        return loss


@dataclass(frozen=True, kw_only=True)
class Traced(Setup):
    """A run that leaves traces of its steps in all that a fit may change."""

    model: Any = "batch_norm"
    epoch_metrics: bool = True
    logged: bool = True
    sanity: int = 0
    trainer: tuple[tuple[str, Any], ...] = field(default=())

    @override
    def make_module(self, life: Attempt) -> Module:
        return TracesModule(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        files = ModelCheckpoint(
            dirpath=life.workdir / ("files" if self.checkpointing else "plain"),
            filename="{step}",
            monitor="validation_loss",
            save_top_k=2,
            save_last=True,
        )
        stopping = EarlyStopping("validation_loss", patience=50)
        return [*super().callbacks(life), Traces(), Begun(), files, stopping]

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        folder = life.workdir / ("logs" if self.checkpointing else "plain_logs")
        logger = CSVLogger(folder, name="", version=0) if self.logged else False
        options = {"logger": logger, "log_every_n_steps": 1, "num_sanity_val_steps": self.sanity}
        return {**super().trainer_options(life), **options, **dict(self.trainer)}

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        files, stopping = trainer.checkpoint_callback, trainer.early_stopping_callback
        assert isinstance(files, ModelCheckpoint)
        assert isinstance(stopping, EarlyStopping)
        names = [Path(path).name for path in [*sorted(files.best_k_models), files.best_model_path]]
        written: dict[str, Any] = {}
        if life.rank == 0:
            written["there"] = sorted(path.name for path in Path(str(files.dirpath)).iterdir())
        if life.rank == 0 and trainer.logger is not None:
            written["rows"] = Path(str(trainer.logger.log_dir), "metrics.csv").read_text()
        return {
            **super().returned(life, trainer),
            **vars(trainer.lightning_module).get("results", {}),
            "files": names,
            "stopping": [bits(stopping.best_score), stopping.wait_count],
            **written,
        }

    @override
    def fault_free(self) -> Self:
        return replace(self, checkpointing=None)


@dataclass(frozen=True, kw_only=True)
class Alone(Traced):
    """One rank under the strategy that joins others again."""

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        return {**super().trainer_options(life), "strategy": MoEStrategy()}
