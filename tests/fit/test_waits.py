"""No hook makes the training thread wait for the device, but where the optimizer is about to step."""

from __future__ import annotations

import itertools
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from door import CheckpointCallback
from fit._seeming_device import SeemingDevice, Wait, seeming_device, waits_of_hooks
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, Popularity, SparseCheckpoint
from lightning_moe_ckpt.journal import Arrival, Arrivals, _journal
from lightning_moe_ckpt.moe import MoELayer

FEATURES = 4
WARM = 3
"""Steps in which sizes are found out, and plans made."""


class Net(LightningModule):
    """Has buffers, experts, logged values, a metric and an attribute that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.BatchNorm1d(FEATURES), MoELayer(FEATURES, 8, 4)
        self.mean = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self.moe(self.norm(batch[0]))
        loss: Tensor = (out - 1).pow(2).mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class WaitForStorage(Callback):
    """Storage takes every generation. What happens while a run starts does not count."""

    def __init__(self, checkpoint: CheckpointCallback, device: SeemingDevice | None) -> None:
        self._checkpoint, self._device = checkpoint, device

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        assert self._checkpoint.wait_committed()
        if self._device is not None and trainer.global_step <= WARM:
            self._device.waits.clear()
            self._device.num_copies = 0


def fit(
    checkpoint: CheckpointCallback,
    device: SeemingDevice | None = None,
    *others: Callback,
    scaled: bool = False,
    accelerator: str = "cpu",
) -> None:
    seed_everything(1, verbose=False)
    net = Net()
    if device is not None:
        device.put(itertools.chain(net.parameters(), net.buffers()))
    callbacks = [WaitForStorage(checkpoint, device), *others, checkpoint]
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "accelerator": accelerator}
    plugins = [scaling()] if scaled else None
    tiny.fit(net, tiny.rows(tiny.waves(64, FEATURES), 4), *callbacks, max_steps=10, plugins=plugins, **options)


@pytest.mark.parametrize(
    ("policy", "scaled"),
    [
        ("sparse", False),
        ("popularity", False),
        pytest.param("dense", False, marks=pytest.mark.soak),
        ("dense", True),
    ],
)
def test_the_host_waits_only_where_the_optimizer_is_about_to_step(
    policy: str, scaled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, logged values and buffers travel meanwhile, and what is stored is the same to the last bit."""
    checkpoint = make(policy, tmp_path / "device")
    with seeming_device(monkeypatch) as device:
        fit(checkpoint, device, scaled=scaled)
    assert checkpoint.report.generations_complete > 2
    assert device.num_copies > 0
    while_training = [wait for wait in device.waits if wait.hook not in {"before_epoch_end", "end"}]
    looks = {("after_batch", "`synchronize`")} if policy == "popularity" else set()  # at the order of experts
    assert {(wait.hook, wait.what) for wait in while_training} == {("before_optimizer_step", "`synchronize`"), *looks}
    fit(make(policy, tmp_path / "host"), scaled=scaled)
    on_device, on_host = stored(tmp_path / "device"), stored(tmp_path / "host")
    both = on_device.keys() & on_host.keys()  # the run may end before storage has the newest
    assert len(both) > WARM
    assert [step for step in sorted(both) if on_device[step] != on_host[step]] == []


class Shrinks(Callback):
    """Has less to say from step to step."""

    def __init__(self) -> None:
        self._said = b"\xff" * 1000

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"said": self._said}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._said = state_dict["said"]

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._said = self._said[:-40]


def test_a_shorter_journal_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    """Memory is used again; what a file holds follows from the state alone."""
    fit(make("dense", tmp_path), None, Shrinks())
    files = stored(tmp_path)
    assert len(files) > 2 * WARM
    for data in files.values():
        header = 8 + int.from_bytes(data[:8], "little")
        start, end = (header + each for each in json.loads(data[8:header])["journal"]["data_offsets"])
        length = 8 + int.from_bytes(data[start : start + 8], "little")
        assert not any(data[start + length : end])


class Fails(Callback):
    """In the first step behind a boundary, whose values are on their way to the host then."""

    @override
    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == WARM + 1:
            raise ZeroDivisionError


class Begins(Callback):
    """Ends the fit where it begins."""

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.step = trainer.global_step
        raise ZeroDivisionError


def test_a_step_that_fails_does_not_cost_the_generation_before_it(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory keeps it for the next incarnation."""
    with pytest.raises(ZeroDivisionError), seeming_device(monkeypatch) as device:
        fit(make("dense", tmp_path), device, Fails())
    begins = Begins()
    with pytest.raises(ZeroDivisionError):
        fit(make("dense", tmp_path), None, begins)
    assert begins.step == WARM + 1
    for path in shared_memory.iterdir():
        path.unlink()


class Watched(Callback):
    """Lets torch warn of whatever waits for the device."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == WARM:
            warnings.simplefilter("always")
            warnings.showwarning = self._noted  # type: ignore[assignment]  # names of what is not used
            torch.cuda.set_sync_debug_mode("warn")

    @override
    def on_train_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def _noted(self, message: Warning | str, *args: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.waits += waits_of_hooks(str(message))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_torch_sees_no_hook_wait_on_a_gpu(policy: str, tmp_path: Path) -> None:
    """Its debug mode is of all threads, and of Lightning: only waits of our hooks on the training thread count."""
    watched = Watched()
    fit(make(policy, tmp_path), None, watched, accelerator="gpu")
    assert not [wait for wait in watched.waits if wait.hook not in {"before_optimizer_step", "before_epoch_end", "end"}]


def scaling() -> MixedPrecision:
    """Lightning makes bf16-mixed of 16-mixed on the CPU."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4))


def test_values_of_several_devices_are_waited_for_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch copies from a device on a stream of that device, and no event on one of another says anything about it."""
    lines: list[str] = []

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: lines.append(f"{name} waits for {other.name}"))

    @contextmanager
    def inside(stream: Any) -> Iterator[None]:
        lines.append(f"enter {stream.name}")
        yield

    def event(**_: bool) -> Any:
        where: list[str] = []
        return SimpleNamespace(
            record=lambda stream: where.append(stream.name),
            synchronize=lambda: lines.append(f"host waits for {where[0]}"),
        )

    def sent(tensors: Any) -> Any:
        lines.extend(f"copy of {tensor.device.index}" for tensor in tensors)
        return tensors

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream(f"side {device.index}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream(f"training {device.index}"))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(_journal, "_sent", sent)
    on_devices: Any = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", index)) for index in (0, 1)]
    on_host = torch.ones(1)
    arrival = Arrivals().start([on_host, *on_devices])
    for index in (0, 1):
        begin = lines.index(f"side {index} waits for training {index}")
        assert lines[begin + 1 : begin + 3] == [f"enter side {index}", f"copy of {index}"]
    assert len(lines) == 6
    assert arrival.wait() == [on_host, *on_devices]
    assert sorted(lines[6:]) == ["host waits for side 0", "host waits for side 1"]


def test_values_that_find_no_memory_cost_a_window_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory, or some on the device, may have run out; torch says so by errors of its own."""
    start, calls = Arrivals.start, itertools.count(1)

    def fails_once(self: Arrivals, tensors: Sequence[Tensor]) -> Arrival:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return start(self, tensors)

    monkeypatch.setattr(Arrivals, "start", fails_once)
    checkpoint = make("sparse", tmp_path)
    with pytest.MonkeyPatch.context() as quiet:
        quiet.setattr(logging.getLogger("lightning_moe_ckpt"), "disabled", True)
        fit(checkpoint)
    assert checkpoint.report.steps == 10
    assert checkpoint.report.generations_complete > 0


def make(policy: str, path: Path) -> CheckpointCallback:
    # Without a target windows begin at the same steps in each run, however busy the machine.
    shared: Any = {"keep": 10, "untouched": ["callback.WaitForStorage.*"], "overhead_target": None}
    if policy == "popularity":
        looks = Popularity(reorder_every_n_steps=3, half_life_steps=2)
        return SparseCheckpoint(str(path), window=2, popularity=looks, **shared)
    if policy == "sparse":
        return SparseCheckpoint(str(path), window=2, **shared)
    return DenseCheckpoint(str(path), every_n_steps=1, **shared)


def stored(path: Path) -> dict[str, bytes]:
    """Bytes of all files by the step in their names."""
    return {file.name.split(".")[1]: file.read_bytes() for file in path.rglob("*.safetensors")}
