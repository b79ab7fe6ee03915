"""A resumed state is loaded once more only where hooks have changed it since, seen by version counters or not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.recovery import RestoreSource
from lightning_moe_ckpt.recovery._replay import Replay
from lightning_moe_ckpt.session import CheckpointSession

FEATURES, STEPS = 4, 12


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(FEATURES, FEATURES), MoELayer(FEATURES, 8, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.moe(self.first(batch[0])) - 1).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Dies(Callback):
    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == STEPS - 1:
            raise RuntimeError("killed")


class Edits(Callback):
    """Changes something as training begins."""

    def __init__(self, edit: Callable[[Net, torch.optim.Optimizer], None]) -> None:
        self._edit = edit

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Net)
        self._edit(pl_module, trainer.optimizers[0])


class WaitForStorage(Callback):
    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        assert self._checkpoint.wait_committed()


def in_place(net: Net, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        net.first.weight.add_(1)


def through_data(net: Net, _: torch.optim.Optimizer) -> None:
    net.first.weight.data[0, 0] += 1


def one_bit(net: Net, _: torch.optim.Optimizer) -> None:
    net.first.weight.data.view(torch.int32)[1, 2] ^= 1


def moments(_: Net, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].data.add_(1)


def other_moments(net: Net, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[net.first.weight]
    state["exp_avg"] = state["exp_avg"] * 2


def count_of_steps(_: Net, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].data += 1


def no_state(_: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def elsewhere(net: Net, _: torch.optim.Optimizer) -> None:
    net.first.weight.data = net.first.weight.data * 3


def there_and_back(net: Net, _: torch.optim.Optimizer) -> None:
    """Weights of an average are swapped in for a validation, and out again."""
    own = net.first.weight.data
    net.first.weight.data = torch.zeros_like(own)
    net.first.weight.data = own
    with torch.no_grad():
        net.first.bias.add_(0.0)


def nothing(_: Net, __: torch.optim.Optimizer) -> None:
    pass


EDITS = [in_place, through_data, one_bit, moments, other_moments, count_of_steps, no_state, elsewhere]


def fit(make: Callable[[], Any], *callbacks: Callback) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    net, checkpoint = Net(), make()
    waits = WaitForStorage(checkpoint)
    trainer = tiny.fit(
        net, tiny.rows(tiny.waves(96, FEATURES), 4), waits, *callbacks, checkpoint, max_epochs=1, max_steps=STEPS + 2
    )
    state = trainer.optimizers[0].state
    moments = {f"{name}.{key}": each for name, param in net.named_parameters() for key, each in state[param].items()}
    return {name: each.detach().clone() for name, each in (dict(net.state_dict()) | moments).items()}


@pytest.mark.parametrize("policy", ["dense", "sparse"])
def test_a_changed_state_is_loaded_again_and_no_other(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All edits are undone to the bit; a state that nobody changed, or that is there again, is loaded once."""
    url = tmp_path.as_uri() + "/run"

    def make() -> Any:
        if policy == "dense":
            return DenseCheckpoint(url, every_n_steps=3, overhead_target=None)
        return SparseCheckpoint(url, window=3, overhead_target=None)

    with pytest.raises(RuntimeError, match="killed"):
        fit(make, Dies())
    loads: list[int] = []
    load = Replay._load_records

    def counted(replay: Replay) -> None:
        loads.append(replay._newest)
        load(replay)

    monkeypatch.setattr(Replay, "_load_records", counted)
    found = {}
    (tmp_path / "run").rename(tmp_path / "kept")
    for edit in (nothing, there_and_back, *EDITS):
        _copy(tmp_path / "kept", tmp_path / "run")
        loads.clear()
        found[edit] = fit(make, Edits(edit))
        assert loads.count(0) == (2 if edit in EDITS else 1), edit
        assert set(loads) == ({0} if policy == "dense" else {0, 1, 2})
    for edit, state in found.items():
        for name, each in found[nothing].items():
            assert torch.equal(state[name], each), (edit, name)


@pytest.mark.parametrize("policy", [DenseCheckpoint, SparseCheckpoint])
def test_records_are_on_their_way_before_they_are_loaded_and_go_behind(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's records are fetched once, ahead of its load; in the end nothing holds the restored bytes."""
    cadence = {"every_n_steps": 3} if policy is DenseCheckpoint else {"window": 3}
    make = partial(policy, tmp_path.as_uri() + "/run", overhead_target=None, **cadence)
    with pytest.raises(RuntimeError, match="killed"):
        fit(make, Dies())
    ahead, found = dict[int, list[int]](), list[RestoreSource]()
    load, begin = Replay._load_records, CheckpointSession.begin

    def loaded(replay: Replay) -> None:
        ahead[replay._newest] = [*replay.fetched]
        load(replay)
        assert not replay.fetched

    def begun(session: CheckpointSession, **options: Any) -> Any:
        start = begin(session, **options)
        found.extend([] if (source := session._run.found) is None else [source])
        return start

    monkeypatch.setattr(Replay, "_load_records", loaded)
    monkeypatch.setattr(CheckpointSession, "begin", begun)
    fit(make)
    assert ahead == {index: [index] for index in range(1 if policy is DenseCheckpoint else 3)}
    assert [source.segments for source in found] == [[]]


def _copy(kept: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(kept, to)
