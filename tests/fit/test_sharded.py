"""What a fit does with parameters in shards, piece by piece; whole fits that are killed are in the campaign."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError, UnsupportedOptimizer
from lightning_moe_ckpt.fit import _files, _limits
from lightning_moe_ckpt.fit._state import Trained
from lightning_moe_ckpt.fit.loops._taps import StepOutcome
from lightning_moe_ckpt.operators import memory_of
from lightning_moe_ckpt.strategy import MoEStrategy


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6), nn.Linear(6, 3))


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    """FSDP2: six rows of a layer are two per rank of three, three rows are one."""
    model = layers()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_columns(mesh: DeviceMesh) -> nn.Sequential:
    """Tensor parallelism of the first layers; the last one is plain."""
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(layers(), mesh, plan)  # type: ignore[return-value]


def backward(model: nn.Module) -> None:
    model(tiny.waves(4, 6)).square().sum().backward()


class Clipping:
    """What `StepOutcome` needs of a trainer."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.precision_plugin, self.params = self, params

    def main_params(self, _: object) -> list[nn.Parameter]:
        return self.params

    def clip_grad_by_norm(self, _: object, __: float) -> None:
        raise AssertionError("ours is called in its place")

    clip_grad_by_value = clip_grad_by_norm

    def _after_closure(self, *_: object) -> None:
        pass


def clipped(model: nn.Module, by: str, value: float) -> tuple[float, list[Tensor]]:
    """Return the norm, 0 by value, and the clipped gradients, as the callback clips."""
    plugin: Any = Clipping(list(model.parameters()))
    outcome = StepOutcome(plugin, None)
    getattr(plugin, f"clip_grad_by_{by}")(None, value)
    norm = outcome.take(0, 0, [])["grad_norm"]
    gradients = [memory_of(p.grad).clone() for p in model.parameters() if p.grad is not None]
    outcome.remove()
    return 0.0 if norm is None else float(norm), gradients


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_one_mesh_clipping_gives_the_bits_of_torch(ranks: int) -> None:
    """So that a callback does not change what is trained; a gradient may be missing."""

    def work(_: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        for by, clip in (("norm", torch.nn.utils.clip_grad_norm_), ("value", torch.nn.utils.clip_grad_value_)):
            ours, torchs = sharded(mesh), sharded(mesh)
            for model in (ours, torchs):
                backward(model)
                model[3].bias.grad = None
            norm, gradients = clipped(ours, by, 0.1)
            total: Any = clip(torchs.parameters(), 0.1)
            assert by == "value" or norm == float(total.full_tensor())
            wanted = [memory_of(p.grad) for p in torchs.parameters() if p.grad is not None]
            assert all(map(torch.equal, gradients, wanted))
            assert len(gradients) == len(wanted) == 7

    run_world(ranks, work)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_gradients_on_several_meshes_are_clipped_together(by: str) -> None:
    """Torch and Lightning raise there. The norm is that of the same model in one process, to rounding, on all ranks."""
    whole = layers()
    backward(whole)
    wanted, _ = clipped(whole, by, 0.1)

    def work(_: int) -> float:
        model = by_columns(init_device_mesh("cpu", (2,)))
        backward(model)
        with pytest.raises(RuntimeError, match="mixed"):
            getattr(torch.nn.utils, {"norm": "clip_grad_norm_", "value": "clip_grad_value_"}[by])(
                model.parameters(), 0.1
            )
        before = [memory_of(p.grad).clone() for p in model.parameters() if p.grad is not None]
        norm, after = clipped(model, by, 0.1)
        scale = 0.1 / (norm + 1e-6)
        for old, new in zip(before, after, strict=True):
            torch.testing.assert_close(new, old * scale if by == "norm" else old.clamp(-0.1, 0.1))
        return norm

    first, second = run_world(2, work)
    assert first == second == pytest.approx(wanted, rel=1e-6)


def trained(model: Any) -> Trained:
    module: LightningModule = tiny.ToZero(*model) if not isinstance(model, LightningModule) else model
    optimizer = torch.optim.AdamW(module.parameters())

    class Fit:
        optimizers = [optimizer]  # noqa: RUF012

        class strategy:  # noqa: N801
            _optimizers = [optimizer]  # noqa: RUF012

    fit: Any = Fit()
    return Trained(fit, module, staged=False)


class Validated(tiny.ToZero):
    """Sharded by itself, so that its root has parameters."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(nn.Linear(6, 10), nn.Linear(10, 6))
        fully_shard(self.net[0], mesh=mesh)
        fully_shard(self, mesh=mesh)


def test_whole_parameters_behind_a_validation_are_not_taken_for_the_users() -> None:
    """A parameter that the user puts in another's place still is, and a fit may begin behind a validation."""

    def work(_: int) -> None:
        module = Validated(init_device_mesh("cpu", (2,)))
        with torch.no_grad():
            module(tiny.waves(4, 6))
        assert not all(isinstance(p, DTensor) for p in module.parameters())
        state = trained(module)
        assert all(isinstance(p, DTensor) for p in module.parameters())
        assert state.unfit() == ""
        with torch.no_grad():
            module(tiny.waves(4, 6))
        assert state.unfit() == ""
        module.net[1].weight = nn.Parameter(torch.zeros(6, 10))
        assert "has other parameters" in state.unfit()

    run_world(2, work)


def kept_after(make: Callable[[DeviceMesh], nn.Module]) -> None:
    """Take gradients that stay between steps, and restore them into a model without any."""
    mesh = init_device_mesh("cpu", (2,))
    models = [make(mesh), make(mesh)]
    backward(models[0])
    before, after = map(trained, models)
    before.not_zeroed()
    before.left_over()
    taken = before.take()
    assert all(type(each) is Tensor for each in taken["kept"].values())
    after.awaited = {"trained": taken}
    after.restore_gradients()
    for was, now in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert was.grad is not None
        assert now.grad is not None
        assert torch.equal(memory_of(now.grad), memory_of(was.grad))
        assert getattr(now.grad, "placements", None) == getattr(was.grad, "placements", None)
        assert now.grad.shape == was.grad.shape


def sequence(mesh: DeviceMesh) -> nn.Module:
    """A norm whose gradient each rank has a term of."""
    plan = {
        "0": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "1": SequenceParallel(sequence_dim=0),
        "2": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(layers(), mesh, plan)


@pytest.mark.parametrize("make", [sharded, by_columns, sequence])
def test_kept_gradients_come_back_where_they_lay(make: Callable[[DeviceMesh], nn.Module]) -> None:
    """As plain tensors in the journal, and in shards, or as terms of a sum, in the module."""
    run_world(2, lambda _: kept_after(make))


# -- fits of one rank: the group is of one, and parameters are in shards all the same


class Sharded(tiny.ToZero):
    """Two layers, of which FSDP2 shards the first and the root the second."""

    def __init__(self, optimizer: tiny.MakeOptimizer = tiny.LEARN) -> None:
        super().__init__(optimizer=optimizer)
        self.configured = False

    @override
    def configure_model(self) -> None:
        if not self.configured:
            self.configured = True
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
            mesh = self.device_mesh
            assert mesh is not None
            fully_shard(self.net[0], mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])


def fit(
    *callbacks: Any,
    ckpt_path: Path | None = None,
    whole_files: bool = False,
    module: Sharded | None = None,
    **options: Any,
) -> tuple[Trainer, Sharded]:
    module = Sharded() if module is None else module
    strategy = ModelParallelStrategy(1, 1, save_distributed_checkpoint=not whole_files)
    trainer = tiny.quiet_trainer(*callbacks, strategy=strategy, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, tiny.rows(tiny.waves(40, 6), 4, num_workers=0), ckpt_path=ckpt_path)
    return trainer, module


def bits(module: nn.Module) -> list[Tensor]:
    return [memory_of(p.detach()).clone() for p in module.parameters()]


@pytest.mark.parametrize("whole_files", [False, True])
def test_a_checkpoint_of_lightning_is_read_once_and_not_over_our_step(tmp_path: Path, whole_files: bool) -> None:
    """The strategy reads it behind `on_fit_start`, where this run has resumed already."""

    def saved(_: int) -> None:
        trainer = fit(max_steps=4, whole_files=whole_files, enable_checkpointing=False)[0]
        trainer.save_checkpoint(tmp_path / "file.ckpt")

    def from_file(steps: int, *, ours: bool) -> list[Tensor]:
        callbacks = [DenseCheckpoint(tmp_path / "run", every_n_steps=2)] if ours else []
        options: Any = {"whole_files": whole_files, "enable_checkpointing": ours}
        return bits(fit(*callbacks, ckpt_path=tmp_path / "file.ckpt", max_steps=steps, **options)[1])

    run_world(1, saved, process_group=False)
    assert (tmp_path / "file.ckpt").is_dir() is not whole_files
    (wanted,) = run_world(1, lambda _: from_file(12, ours=False), process_group=False)
    run_world(1, lambda _: from_file(8, ours=True), process_group=False)
    (found,) = run_world(1, lambda _: from_file(12, ours=True), process_group=False)
    assert all(map(torch.equal, found, wanted))


def test_a_torch_without_fsdp2_on_cpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.6 is, which fails in its first step by a stream that records no event."""
    monkeypatch.delattr(torch.cpu.Stream, "record_event")

    def refused(_: int) -> None:
        with pytest.raises(ConfigurationError, match=r"`fully_shard` trains on CPUs from torch 2\.7 on"):
            fit(DenseCheckpoint(tmp_path / "run", every_n_steps=2), max_steps=2)

    run_world(1, refused, process_group=False)
    assert not (tmp_path / "run").exists()


class Renamed(Sharded):
    """The same shards, on a mesh of another name."""

    @property
    @override
    def device_mesh(self) -> Any:
        return {"data_parallel": init_device_mesh("cpu", (1,), mesh_dim_names=("renamed",))}


def test_a_run_resumes_where_meshes_have_other_names(tmp_path: Path) -> None:
    def work(_: int, steps: int, module: Sharded, run: str = "run") -> list[Tensor]:
        trainer, module = fit(DenseCheckpoint(tmp_path / run, every_n_steps=2), max_steps=steps, module=module)
        assert trainer.global_step == steps
        return bits(module)

    (wanted,) = run_world(1, lambda rank: work(rank, 8, Sharded(), "through"), process_group=False)
    run_world(1, lambda rank: work(rank, 4, Sharded()), process_group=False)
    (found,) = run_world(1, lambda rank: work(rank, 8, Renamed()), process_group=False)
    assert all(map(torch.equal, found, wanted))


class RowMeans(torch.optim.Optimizer):
    """Keeps a mean for each row of a parameter."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for param in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            rows = param.grad.square().mean(-1) if param.ndim > 1 else param.grad.square()
            self.state[param]["rows"] = rows + self.state[param].get("rows", 0.0)
            param.sub_(param.grad, alpha=0.01)
        return loss


def test_statistics_of_rows_in_shards_are_refused_by_name(tmp_path: Path) -> None:
    """Nobody has them whole; nothing is opened."""

    def work(_: int) -> None:
        with pytest.raises(UnsupportedOptimizer, match=r"`RowMeans` keeps `rows`, \[10\], for `net.0.weight`"):
            fit(DenseCheckpoint(tmp_path / "run"), max_steps=2, module=Sharded(optimizer=RowMeans))

    run_world(1, work, process_group=False)
    assert not (tmp_path / "run").exists()


def test_a_folder_half_written_again_is_seen(tmp_path: Path) -> None:
    """Its end is taken away before it is written again: an old end would vouch for shards of two steps."""

    def work(_: int) -> list[bool]:
        found = []

        class Look(ModelCheckpoint):
            @override
            def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
                strategy: Any = trainer.strategy
                save = strategy.save_checkpoint

                def look(checkpoint: Any, path: Any, **options: Any) -> None:
                    found.append(_files._torn(str(path)))
                    save(checkpoint, path, **options)
                    found.append(_files._torn(str(path)))

                strategy.save_checkpoint = look
                super()._save_checkpoint(trainer, filepath)
                strategy.save_checkpoint = save

        files = Look(tmp_path / "files", filename="same", every_n_train_steps=2, enable_version_counter=False)
        fit(DenseCheckpoint(tmp_path / "run", every_n_steps=2), files, max_steps=4)
        return found

    (found,) = run_world(1, work, process_group=False)
    assert found == [False, False, True, False]


def test_an_edit_without_a_trace_is_no_difference(tmp_path: Path) -> None:
    """The gradients of the step do not lead to what a hook has made of the weights since."""

    class Decay(Callback):
        def __init__(self, stop: int) -> None:
            self.stop = stop

        @override
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == self.stop:
                raise InterruptedError

        @override
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            torch._foreach_mul_([p.detach() for p in pl_module.parameters()], 0.9)

    def decayed(run: str, stop: int = -1) -> list[Tensor]:
        ours = DifferentialCheckpoint(tmp_path / run, every_n_steps=8)
        return bits(fit(Decay(stop), ours, max_steps=9)[1])

    def stopped(_: int) -> None:
        with pytest.raises(InterruptedError):
            decayed("run", 6)

    (wanted,) = run_world(1, lambda _: decayed("through"), process_group=False)
    run_world(1, stopped, process_group=False)
    (found,) = run_world(1, lambda _: decayed("run"), process_group=False)
    assert all(map(torch.equal, found, wanted))


def test_the_strategy_of_experts_names_that_of_shards() -> None:
    class Whole(Sharded):
        @override
        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(6, 6))
            fully_shard(self.net)

    def work(_: int) -> None:
        with pytest.raises(ConfigurationError, match="Use `ModelParallelStrategy`, or leave parameters whole"):
            tiny.quiet_trainer(strategy=MoEStrategy(), max_steps=1).fit(Whole(), tiny.rows(tiny.waves(40, 6), 4))

    run_world(1, work, process_group=False)


def test_hooks_beside_copies_make_them_wait() -> None:
    """Where they may change shards without a trace; library callbacks and our own do not count."""

    class Hooked(Sharded):
        @override
        def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
            pass

    class Stepping(Sharded):
        @override
        def optimizer_step(self, *args: Any) -> None:
            pass

    def work(_: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (1,))
        trainer = tiny.quiet_trainer(LearningRateMonitor(), logger=True)
        modules: list[LightningModule] = [Validated(mesh), Hooked(), tiny.with_dropout(), Stepping()]
        for module in (modules[1], modules[3]):
            module.register_parameter("own", next(Validated(mesh).net[0].parameters()))
        return [_limits.may_edit_unseen(trainer, module, ()) for module in modules]

    assert run_world(1, work) == [[False, True, False, True]]


def test_a_norm_of_shards_that_is_logged_comes_back(tmp_path: Path) -> None:
    """As a plain tensor: what torch and DTensors return of shards is one of their own kind."""

    class Logs(Sharded):
        @override
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log("norm", torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))
            self.log("mean", next(self.parameters()).detach().norm(), on_epoch=True)

    def logged(folder: str, steps: int) -> dict[str, float]:
        trainer, _ = fit(DenseCheckpoint(tmp_path / folder, every_n_steps=2), max_steps=steps, module=Logs())
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    (wanted,) = run_world(1, lambda _: logged("through", 8), process_group=False)
    run_world(1, lambda _: logged("run", 4), process_group=False)
    (found,) = run_world(1, lambda _: logged("run", 8), process_group=False)
    assert found == wanted
    assert {"norm", "mean_step", "mean_epoch"} <= found.keys()
