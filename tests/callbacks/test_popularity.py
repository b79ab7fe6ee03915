"""How a user says what popularity means: in code, in a configuration file, and what is refused before training."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lightning_moe_ckpt.callbacks import Popularity, SparseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError


class Listed(LightningModule):
    """Experts in a list, whose capacity nobody can see."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        weights_TE = self.gate(batch[0]).softmax(-1)
        out = torch.stack([expert(batch[0]) for expert in self.experts], dim=-1)
        loss: Tensor = (out * weights_TE[:, None]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def fit(checkpoint: SparseCheckpoint) -> None:
    tiny.fit(Listed(), tiny.rows(torch.ones(4, 4)), checkpoint, max_epochs=1)


def test_a_configuration_file_sets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI builds it from YAML; what is left out keeps its default, and it may be left out."""
    (tmp_path / "config.yaml").write_text(
        "trainer:\n  logger: false\n  accelerator: cpu\n  callbacks:\n"
        "    - class_path: lightning_moe_ckpt.callbacks.SparseCheckpoint\n"
        "      init_args:\n        url: one\n"
        "        popularity: {counts: soft, half_life_steps: 50, reorder_fraction: 0.5}\n"
        "    - class_path: lightning_moe_ckpt.callbacks.SparseCheckpoint\n      init_args: {url: other}\n"
    )
    monkeypatch.setattr("sys.argv", ["train", "--config", str(tmp_path / "config.yaml")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning uses what jsonargparse deprecates
        cli = LightningCLI(Listed, run=False)
    callbacks: list[Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
    found = [callback.popularity for callback in callbacks if isinstance(callback, SparseCheckpoint)]
    assert found == [Popularity(counts="soft", half_life_steps=50, reorder_fraction=0.5), None]


@pytest.mark.parametrize("options", [{"order": "fixed"}, {"order": "back_to_front"}, {"schedule": [["a"]]}])
def test_popularity_without_an_order_by_it_is_refused(options: dict[str, Any]) -> None:
    """It would be measured for nothing."""
    with pytest.raises(ConfigurationError, match="popularity is measured only with order='popularity'"):
        SparseCheckpoint("run", popularity=Popularity(), **options)


def test_a_layer_that_does_not_show_its_capacity_is_named_at_start(tmp_path: Path) -> None:
    """With the remedy; no step is taken."""
    wanted = (
        r"`Popularity\(per_capacity=True\)`: the capacity of experts cannot be seen in `root`.*`per_capacity=False`"
    )
    with pytest.raises(ConfigurationError, match=wanted):
        fit(SparseCheckpoint(str(tmp_path / "run"), popularity=Popularity(per_capacity=True)))
    fit(SparseCheckpoint(str(tmp_path / "run"), popularity=Popularity(counts="soft")))


def test_looks_that_come_before_a_plan_can_start_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the least number of steps that is safe for the windows asked for."""
    with caplog.at_level(logging.WARNING, logger="lightning_moe_ckpt"):
        SparseCheckpoint(str(tmp_path), window=4, popularity=Popularity(reorder_every_n_steps=6))
        assert not caplog.records
        SparseCheckpoint(str(tmp_path), window=4, popularity=Popularity(reorder_every_n_steps=5))
    assert "Look every 6 steps" in caplog.text
