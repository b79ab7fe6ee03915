"""Taps are put on instances and taken off again; the private names they rely on exist."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launcher import run_world
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_moe_ckpt.fit.loops import _port
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.strategy._model_state import BufferSync


def test_the_clipping_tap_leaves_nothing_behind() -> None:
    """Nor does it remove a tap that somebody put on top of it."""
    precision, calls = Precision(), list[float]()
    remove = _port.tap_clipping(precision, lambda _, value: calls.append(value))
    precision.clip_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 0.5)
    assert calls == [0.5]
    remove()
    assert "clip_grad_by_norm" not in vars(precision)

    remove = _port.tap_clipping(precision, lambda _, value: calls.append(value))
    precision.clip_grad_by_norm = later = lambda *_: None  # type: ignore[method-assign]
    remove()
    assert vars(precision)["clip_grad_by_norm"] is later


@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_verdict_is_combined_before_the_scaler_acts(has_gradient: bool) -> None:
    """Also on a rank without any gradient, where the scaler alone would fail."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def combine(found_inf: Tensor) -> None:
        found_inf.fill_(1.0)  # as if another rank had overflowed

    precision = MixedPrecision("16-mixed", "cpu", scaler)
    remove = _port.tap_found_inf(precision, combine, torch.device("cpu"))
    scaler.scale(parameter.sum())
    if has_gradient:
        parameter.grad = torch.ones(2)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 2.0
    remove()
    assert "_unscale_grads_" not in vars(scaler)


def test_a_plugin_without_scaler_needs_no_tap() -> None:
    """fp32 and bf16."""
    _port.tap_found_inf(Precision(), lambda _: None, torch.device("cpu"))()


def test_only_buffers_that_changed_are_voted_for() -> None:
    """By version counter; running statistics always in training, because their kernels do not count."""
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Module())
    module[1].register_buffer("cache", torch.zeros(2))
    module[1].register_buffer("ignored", torch.zeros(2))
    sync = BufferSync(module, {"1.ignored"}, ParallelGroups())
    module.eval()
    assert not any(sync.votes().values())
    assert "buffer/1.ignored" not in sync.votes()
    module[1].get_buffer("cache").add_(1)
    assert [name for name, changed in sync.votes().items() if changed] == ["buffer/1.cache"]
    module.train()
    version = module[0].get_buffer("running_mean")._version
    module[0](torch.randn(4, 3))
    assert module[0].get_buffer("running_mean")._version == version, "the kernel counts now: simplify BufferSync"
    assert sync.votes()["buffer/0.running_mean"] == 1
    assert list(sync.votes()) == sync.flags


def test_buffers_that_a_forward_replaces_are_voted_for() -> None:
    """Also where the newest is at the place in memory of one that is gone, as every second one is that takes another's."""
    module: Any = nn.Module()
    module.register_buffer("average", torch.zeros(2))
    sync = BufferSync(module, (), ParallelGroups())
    for _ in range(20):
        module.average = module.average * 0.5
        assert sync.votes() == {"buffer/average": 1}


def test_names_are_registered_for_strings() -> None:
    """On import of the package; each with its start method."""
    for name, start_method in (("moe", "popen"), ("moe_spawn", "spawn"), ("moe_fork", "fork")):
        strategy = pl.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
        assert isinstance(strategy, MoEStrategy)
        assert strategy._start_method == start_method


def _threads_of_fits(numbers: list[int]) -> list[int]:
    """Return with how many threads of torch steps ran, of fits ahead of which a script sets `numbers`."""
    found = []

    class Model(BoringModel):
        def on_train_batch_end(self, *_: object) -> None:
            found.append(torch.get_num_threads())

    for number in numbers:
        torch.set_num_threads(number)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=MoEStrategy(), max_steps=1, limit_val_batches=0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Model())
    return found


def test_threads_are_as_many_as_the_script_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would give the first fit all cores, where nobody has set `OMP_NUM_THREADS`; it never gets more than those."""

    def fits(numbers: list[int], _: int) -> list[int]:
        del os.environ["OMP_NUM_THREADS"]
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        monkeypatch.setattr("lightning.fabric.utilities.distributed._num_cpus_available", lambda: 2)
        return _threads_of_fits(numbers)

    for numbers, wanted in (([1, 1, 2], [1, 1, 2]), ([5], [2])):
        assert run_world(1, partial(fits, numbers), process_group=False) == [wanted]


CONFIGURATION = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_moe_ckpt.strategy.MoEStrategy
    init_args:
      expert_parallel: 2
      gradient_reduction: allreduce
      timeout: "0:05:00"
"""


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended to run")
def test_a_yaml_configuration_builds_the_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`class_path` and `init_args`, with a time-out as text."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's use of it, not ours
    (tmp_path / "config.yaml").write_text(CONFIGURATION)
    cli = LightningCLI(
        BoringModel,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args=["--config", str(tmp_path / "config.yaml")],
    )
    built = cli.trainer.strategy
    assert isinstance(built, MoEStrategy)
    assert (built.expert_parallel, built.gradient_reduction) == (2, "allreduce")
    assert built.timeout.total_seconds() == 300
