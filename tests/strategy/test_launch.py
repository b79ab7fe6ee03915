"""However the processes are started, they find each other and train the same model."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from launcher import run_world
from lightning.pytorch.demos.boring_classes import BoringModel

SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.moe = None

    def configure_model(self):
        if self.moe is None:
            self.moe = MoELayer(32, 8, 4)

    def forward(self, x):
        return self.layer(x + self.moe(x))

    def on_train_end(self):
        torch.save(
            {name: p.detach().clone() for name, p in self.named_parameters()},
            f"{sys.argv[1]}/rank{self.trainer.global_rank}.pt",
        )


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = MoEStrategy(expert_parallel=2, start_method=sys.argv[2])
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, limit_val_batches=0, **quiet
    )
    trainer.fit(Model())
"""


def run(arguments: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """Run a cold process that starts two ranks; returns rank 0's parameters with all experts."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, timeout=150, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return require_one_model(folder)


def require_one_model(folder: Path) -> dict[str, torch.Tensor]:
    """Two ranks have ended with the same dense layer and other experts; rank 0's parameters with all experts."""
    first, second = (torch.load(folder / f"rank{rank}.pt") for rank in range(2))
    assert torch.equal(first["layer.weight"], second["layer.weight"])
    assert not torch.equal(first["moe.w1"], second["moe.w1"])
    first["moe.w1"] = torch.cat([first["moe.w1"], second["moe.w1"]])
    return {name: first[name] for name in ("layer.weight", "moe.w1", "moe.gate.weight")}


def forget_launcher() -> None:
    """Let this process be one that no launcher has started."""
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]


def write_script(folder: Path) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return str(script)


def test_lightning_starts_the_processes_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Trainer(devices=2)`: rank 0 runs the script in a fork of this process and starts the other one cold."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    arguments = [write_script(tmp_path), str(tmp_path), "popen"]

    def work(_: int) -> None:
        forget_launcher()
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

    run_world(1, work, process_group=False, timeout=timedelta(seconds=150))
    require_one_model(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_torchrun_and_spawn_give_the_bits_of_lightnings_launcher(tmp_path: Path) -> None:
    """`spawn` pickles the strategy; torchrun starts the ranks itself."""
    script = write_script(tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launched = run([script, str(tmp_path), "popen"], tmp_path)
    for arguments in ([script, str(tmp_path), "spawn"], [*torchrun, script, str(tmp_path), "popen"]):
        again = run(arguments, tmp_path)
        for name, parameter in launched.items():
            assert torch.equal(again[name], parameter)


def test_forked_processes_train_and_hand_the_model_back() -> None:
    """`Trainer(strategy="moe_fork")` from a notebook-like process."""

    def work(_: int) -> bool:
        forget_launcher()
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="moe_fork",
            max_steps=3,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = BoringModel()
        before = model.layer.weight.detach().clone()
        trainer.fit(model)
        return not torch.equal(before, model.layer.weight)

    assert run_world(1, work, process_group=False) == [True]
