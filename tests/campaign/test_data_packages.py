"""Data sets and loaders of other packages, written to a folder: a restart gives the same batches, or ends before it trains on others."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._data import Tokens
from campaign._training import Checkpointing
from campaign._variants import Variant
from lightning_moe_ckpt.testing import Attempt, AttemptFailed, Kill

ITEMS = Tokens(24, augment=False)


@dataclass(frozen=True, kw_only=True)
class Packaged(Variant):
    """A run on data of a package, six steps per epoch."""

    package: str
    batches: int = 6
    epochs: int = 3
    validate_every: int | None = None

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [SetsEpoch()] if self.package == "datasets" else []

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        warnings.filterwarnings("ignore", "The given .* is not writable", UserWarning)  # of what two of them read
        return PACKAGES[self.package](self, Path(tempfile.mkdtemp(dir=life.workdir))), None


class SetsEpoch(Callback):
    """Lets a stream be shuffled anew in each epoch."""

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.train_dataloader is not None
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)


def _collated(items: Sequence[Any]) -> list[Tensor]:
    return [torch.stack([torch.as_tensor(item[name]) for item in items]) for name in ("tokens", "targets")]


def _litdata(setup: Packaged, folder: Path) -> Any:
    litdata = pytest.importorskip("litdata")
    cache = litdata.streaming.Cache(input_dir=str(folder), chunk_size=8)
    for index in range(len(ITEMS)):
        cache[index] = dict(zip(("tokens", "targets"), ITEMS[index], strict=True))
    cache.done()
    cache.merge()
    stream = litdata.StreamingDataset(str(folder), shuffle=True, seed=42, drop_last=True)
    return litdata.StreamingDataLoader(stream, **_options(setup))


def _streaming(setup: Packaged, folder: Path) -> Any:
    streaming = pytest.importorskip("streaming")
    columns = {"tokens": "ndarray:int64", "targets": "ndarray:int64"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=800) as writer:
        for index in range(len(ITEMS)):
            writer.write({name: each.numpy() for name, each in zip(columns, ITEMS[index], strict=True)})
    streaming.base.util.clean_stale_shared_memory()
    stream = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=setup.batch_size)
    return streaming.StreamingDataLoader(stream, **_options(setup))


def _datasets(setup: Packaged, folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    tokens, targets = zip(*(ITEMS[index] for index in range(len(ITEMS))), strict=True)
    made = datasets.Dataset.from_dict(
        {"tokens": list(map(Tensor.tolist, tokens)), "targets": list(map(Tensor.tolist, targets))}
    )
    stream = made.with_format("torch").to_iterable_dataset(num_shards=4).shuffle(seed=42, buffer_size=10)
    return DataLoader(stream, **_options(setup))


def _stateful(setup: Packaged, folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(ITEMS, batch_size=setup.batch_size, num_workers=setup.workers, shuffle=True)


def _nodes(setup: Packaged, folder: Path) -> Any:
    from torchdata import nodes

    batches = nodes.Batcher(nodes.MapStyleWrapper(ITEMS, sampler=SequentialSampler(ITEMS)), setup.batch_size)
    return nodes.Loader(nodes.Mapper(batches, torch.utils.data.default_collate))


def _webdataset(setup: Packaged, folder: Path) -> Any:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(folder / "items.tar")) as writer:
        for index in range(len(ITEMS)):
            tokens, targets = (each.numpy() for each in ITEMS[index])
            writer.write({"__key__": f"{index:04}", "tokens.npy": tokens, "targets.npy": targets})
    stream = webdataset.WebDataset(str(folder / "items.tar"), shardshuffle=False).shuffle(10).decode()
    return DataLoader(
        stream.to_tuple("tokens.npy", "targets.npy"), batch_size=setup.batch_size, num_workers=setup.workers
    )


def _options(setup: Packaged) -> dict[str, Any]:
    return {"batch_size": setup.batch_size, "num_workers": setup.workers, "collate_fn": _collated}


PACKAGES: dict[str, Callable[[Packaged, Path], Any]] = {
    "stateful": _stateful,
    "nodes": _nodes,
    "datasets": _datasets,
    "litdata": _litdata,
    "streaming": _streaming,
    "webdataset": _webdataset,
}
DENSE = Checkpointing(policy="dense", every_n_steps=1)
EXACT = [name for name in PACKAGES if name != "webdataset"]


def _require(name: str) -> None:
    if name in {"datasets", "litdata", "streaming", "webdataset"}:
        pytest.importorskip(name, reason=f"{name} is no dependency of the tests: install it to run them")


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", EXACT)
def test_killed_on_data_of_a_package_the_run_ends_the_same(campaigns: Campaigns, name: str, workers: int) -> None:
    """In the second epoch and in the third, at steps that are drawn."""
    _require(name)
    draw = random.Random(f"{name} {workers}")
    kills = [Kill(phase="after_batch_end", step=draw.randint(*steps), settle=10.0) for steps in ((7, 11), (13, 16))]
    campaigns.check(Packaged(package=name, workers=workers, checkpointing=DENSE), *kills)


def test_data_that_is_shuffled_by_a_clock_is_refused_or_logged(campaigns: Campaigns) -> None:
    """What webdataset shuffles by default comes in no order twice: a restart says so, and `batches="log"` needs none."""
    _require("webdataset")
    kill = Kill(phase="after_batch_end", step=8, settle=10.0)
    setup = Packaged(package="webdataset", checkpointing=DENSE)
    with pytest.raises(AttemptFailed, match=r"OtherData: .* begin a run with batches='log'"):
        campaigns.run(setup, kill)
    logs = replace(DENSE, arguments=(("batches", "log"),))
    *_, last = campaigns.run(replace(setup, checkpointing=logs), kill)
    assert "this restart is exact up to the step at which the state is dense" in last.log()
