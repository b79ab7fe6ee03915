"""Parameters that do not train: stored once, read only where a script makes others, taken again when they change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from door import size_text
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.errors import NoUsableGeneration
from lightning_moe_ckpt.inspection import export, verify
from lightning_moe_ckpt.storage import Retention, collect_garbage, open_backend


class Adapted(LightningModule):
    """A wide base, and a narrow layer that trains."""

    def __init__(self, *, seed: int = 1, train_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base: Any = nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 8))
        self.head = nn.Linear(8, 1)
        self.base.requires_grad_(train_all)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.head(self.base(batch)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(module: LightningModule, callback: Any, steps: int = 4) -> Any:
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    tiny.fit(module, DataLoader(data, batch_size=4), callback, max_steps=steps)  # type: ignore[arg-type]  # tensors are data sets
    return callback


def constants(url: Path) -> list[Path]:
    return sorted((url / "const").rglob("*.safetensors"))


@pytest.mark.parametrize("policy", [SparseCheckpoint, DenseCheckpoint, DifferentialCheckpoint])
def test_a_base_is_stored_once_and_read_only_where_it_differs(tmp_path: Path, policy: type, caplog: Any) -> None:
    """Three starts: with the same base, with another one, and with another one whose stored copy is damaged."""
    url, options = tmp_path / "run", {"window": 2} if policy is SparseCheckpoint else {"every_n_steps": 2}
    make = partial(policy, str(url), overhead_target=None, **options)
    first = Adapted()
    report = fit(first, make()).report
    trained = 3 * sum(param.nbytes for param in first.head.parameters())
    assert report.dense_nbytes < 2 * trained < first.base[0].weight.nbytes
    (file,) = constants(url)
    sizes = [path.stat().st_size for path in (url / "snap").rglob("*.safetensors")]
    assert sizes
    assert max(sizes) < file.stat().st_size, "no generation has the base"
    size = sum(param.nbytes for param in first.base.parameters())
    for seed, read in ((1, f"of which {size_text(0)} were read"), (2, f"of which {size_text(size)} were read")):
        caplog.clear()
        caplog.set_level("INFO", "lightning_moe_ckpt")
        again = Adapted(seed=seed)
        fit(again, make(), steps=4 + 2 * seed)
        assert read in caplog.text
        assert all(torch.equal(a, b) for a, b in zip(first.base.parameters(), again.base.parameters(), strict=True))
    assert constants(url) == [file]
    assert verify(open_backend(str(url))).sound
    damaged = bytearray(file.read_bytes())
    damaged[5000] ^= 1
    file.write_bytes(damaged)
    assert file.name in verify(open_backend(str(url))).problems[0].reason
    fit(Adapted(seed=1), make(), steps=10)  # whose base is as it was
    with pytest.raises(NoUsableGeneration, match="is not what was written, and what this script makes of it"):
        fit(Adapted(seed=3), make(), steps=12)


def test_an_export_has_the_base(tmp_path: Path) -> None:
    module, url = Adapted(), str(tmp_path / "run")
    fit(module, DenseCheckpoint(url, every_n_steps=2, overhead_target=None))
    export(open_backend(url), tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in module.state_dict().items())


def test_a_base_goes_with_the_last_generation_that_has_it(tmp_path: Path) -> None:
    """Of another run under the URL, and only when that one has been given up."""
    url = tmp_path / "run"
    fit(Adapted(), DenseCheckpoint(str(url), every_n_steps=1, overhead_target=None))
    (old,) = constants(url)
    fit(Adapted(seed=2), DenseCheckpoint(str(url), every_n_steps=1, overhead_target=None, resume="never"), steps=8)
    collect_garbage(open_backend(str(url)), Retention(last=1))
    (new,) = constants(url)
    assert new != old
    assert verify(open_backend(str(url))).sound


def test_all_that_changes_is_taken_again(tmp_path: Path) -> None:
    """What was a constant until its bytes changed has records, and a restart has its last value."""

    class Edits(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                pl_module.base[0].weight.data.mul_(2)

    url = str(tmp_path / "run")
    first, again = Adapted(), Adapted()
    for module, steps in ((first, 6), (again, 7)):
        callback = DenseCheckpoint(url, every_n_steps=1, overhead_target=None)
        trainer = Trainer(
            accelerator="cpu", max_steps=steps, callbacks=[callback, Edits()], logger=False, enable_progress_bar=False
        )
        trainer.fit(module, DataLoader(torch.ones(32, 8), batch_size=4))  # type: ignore[arg-type]
    assert torch.equal(first.base[0].weight, 2 * Adapted().base[0].weight)
    assert torch.equal(first.base[0].weight, again.base[0].weight)
    assert torch.equal(first.base[2].weight, Adapted().base[2].weight)
