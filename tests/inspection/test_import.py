"""`moe-ckpt import`: what other tools wrote becomes a generation that is whole, and comes out again as it went in."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import multiprocessing
import re
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import tiny
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import Self, override

from inspection._runs import FEATURES, Small
from inspection.test_boxes import same
from inspection.test_export import markers_of
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.inspection import _export, commands, verify
from lightning_moe_ckpt.storage import HuggingFaceEntry, RunStore, RunView, open_backend

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


class Groups(LightningModule):
    """A batch norm, tied weights, two groups of the optimizer, and a schedule."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 6})
        self.norm = nn.BatchNorm1d(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 6), nn.Linear(6, FEATURES)
        self.again = nn.Linear(FEATURES, 6, bias=False)
        self.again.weight = self.up.weight
        self.optimizer = optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = self.up(self.norm(batch[0]))
        return (self.down(h + self.again(batch[0]))).square().mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def by_dimensions(module: Any) -> torch.optim.Optimizer:
    """Decay of matrices only, as is usual."""
    params: list[Any] = list(module.parameters())
    groups = [{"params": [p for p in params if p.ndim == 2]}, {"params": [p for p in params if p.ndim == 1]}]
    return torch.optim.AdamW(groups, 1e-2)


def by_halves(module: nn.Module) -> torch.optim.Optimizer:
    """Each group has vectors."""
    params: list[Any] = list(module.parameters())
    groups: list[Any] = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}]
    return torch.optim.AdamW(groups, 1e-2)


def written_by_lightning(path: Path, module: LightningModule) -> dict[str, Any]:
    """Train, and return what Lightning has written."""
    trainer = tiny.fit(module, tiny.rows(tiny.waves(24, FEATURES), 2), max_steps=3, default_root_dir=path.parent)
    trainer.save_checkpoint(path)
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def imported(src: Path, url: Path, *options: str) -> None:
    """Import in parts of a few elements, and verify them."""
    assert main(["import", str(src), str(url), "--part-size", "64", *options]) == 0
    assert verify(open_backend(str(url))).sound
    assert len(markers_of(str(url))) > 1


def equal(left: Any, right: Any) -> bool:
    """Equal values of the same types, tensors by bits."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    return bool(left == right)


@pytest.mark.parametrize("make", [Small, lambda: Groups(by_dimensions)], ids=["one group", "two groups"])
def test_a_checkpoint_of_lightning_comes_out_as_it_went_in(
    make: Callable[[], LightningModule], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, buffers, ties, optimizer, schedules, callbacks, loops and hyper-parameters, in parts that cut tensors."""
    before = written_by_lightning(tmp_path / "a.ckpt", make())
    imported(tmp_path / "a.ckpt", tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "b.ckpt")]) == 0
    assert equal(before, torch.load(tmp_path / "b.ckpt", weights_only=True))
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["kind"], found["policy"]["imported"]) == (3, "dense", "a.ckpt of Lightning")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "c.ckpt"), "--weights-only"]) == 0
    rest = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & rest.keys()


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (by_halves, "several groups"),
        (lambda module: torch.optim.AdamW(list(module.parameters())[::-1], 1e-2), "fit no order"),
        (lambda module: torch.optim.AdamW([module.down.bias], 1e-2), "fit several orders"),
    ],
    ids=["groups", "order", "choice"],
)
def test_numbers_that_could_be_several_names_are_refused(
    optimizer: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written; with --weights-only the weights are."""
    before = written_by_lightning(tmp_path / "a.ckpt", Groups(optimizer))
    assert main(["import", str(tmp_path / "a.ckpt"), str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "Give --weights-only" in said
    imported(tmp_path / "a.ckpt", tmp_path / "run", "--weights-only")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "b.safetensors"), "--step", "0"]) == 0
    assert same(load_file(tmp_path / "b.safetensors"), before["state_dict"])


def test_names_of_parameters_in_groups_are_taken(tmp_path: Path) -> None:
    """As torch stores them for an optimizer of `named_parameters`."""

    def halves(module: nn.Module) -> torch.optim.Optimizer:
        params: list[Any] = list(module.named_parameters())
        groups: list[Any] = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}]
        return torch.optim.AdamW(groups, 1e-2)

    before = written_by_lightning(tmp_path / "a.ckpt", Groups(halves))
    imported(tmp_path / "a.ckpt", tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "b.ckpt")]) == 0
    assert equal(before, torch.load(tmp_path / "b.ckpt", weights_only=True))


@pytest.mark.parametrize("nested", ["app", ""], ids=["one object", "side by side"])
def test_a_folder_of_torch_dcp(nested: str, tmp_path: Path) -> None:
    """A model and its optimizer, by name."""
    module = Small()
    tiny.fit(module, tiny.rows(tiny.waves(24, FEATURES), 2), max_steps=2, enable_checkpointing=False)
    weights, optimizer = cast("Any", get_state_dict(module, module.trainer.optimizers[0]))
    state = {"model": weights, "optim": optimizer}
    save({"app": state} if nested else state, checkpoint_id=tmp_path / "dcp")
    imported(tmp_path / "dcp", tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m.safetensors"), "--optimizer"]) == 0
    assert same(load_file(tmp_path / "m.safetensors"), weights)
    moments = {f"{name}/{key}": each for name, of in optimizer["state"].items() for key, each in of.items()}
    assert same(load_file(tmp_path / "m.optimizer.safetensors"), moments)


def hugging_face(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Two files of weights, and a configuration."""
    folder.mkdir()
    for number, part in enumerate((list(tensors)[:1], list(tensors)[1:]), 1):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number:05d}-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["Toy"], "dtype": "float32"}))
    return folder


def test_a_folder_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights only, which is said; under the name that the model has in the module."""
    tensors = {"a.weight": torch.randn(6, 5).bfloat16(), "b.mask": torch.tensor([True, False]), "c": torch.randn(3)}
    src = hugging_face(tmp_path / "hf", tensors)
    imported(src, tmp_path / "run", "--prefix", "model.")
    assert "weights only" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m.safetensors")]) == 0
    assert same(load_file(tmp_path / "m.safetensors"), {f"model.{name}": each for name, each in tensors.items()})


def test_a_place_with_checkpoints_is_refused(
    dense_run: tuple[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run there stays as it is."""
    torch.save(Small().state_dict(), tmp_path / "a.pt")
    before = [each.generation for each in RunView.open(open_backend(dense_run[0])).generations()]
    assert main(["import", str(tmp_path / "a.pt"), dense_run[0]]) == 2
    assert "has a run, whose newest checkpoint is of step 6" in capsys.readouterr().err
    assert [each.generation for each in RunView.open(open_backend(dense_run[0])).generations()] == before


def test_an_import_that_was_interrupted_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left is no generation."""
    torch.save(Small().state_dict(), tmp_path / "a.pt")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "commit", killed)
        with pytest.raises(SystemExit):
            main(["import", str(tmp_path / "a.pt"), str(tmp_path / "run")])
    imported(tmp_path / "a.pt", tmp_path / "run")
    usable = [each for each in RunView.open(open_backend(str(tmp_path / "run"))).generations() if each.usable]
    assert [each.generation.incarnation for each in usable] == [2]


class Unsafe:
    """Not of a type that `torch.load(weights_only=True)` takes."""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"state_dict": {"w": torch.ones(2)}, "callbacks": {"mine": Unsafe()}}, "does not read it"),
        ({"weights": {"w": torch.ones(2)}, "step": 3}, "has no `state_dict` of tensors, but 'weights', 'step'"),
        ([torch.ones(2)], "holds a list"),
        ({"state_dict": {"w": torch.ones(2)}, "optimizer_states": [1, 2]}, "has 2 optimizers"),
        (
            {
                "state_dict": {"w": torch.ones(2)},
                "optimizer_states": [{"state": {0: {"words": "no"}}, "param_groups": [{"params": [0]}]}],
            },
            "words of its optimizer state is a str",
        ),
    ],
    ids=["unsafe", "no state", "no dict", "optimizers", "no tensor"],
)
def test_what_is_no_such_checkpoint_is_refused(
    content: object, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was found."""
    torch.save(content, tmp_path / "a.ckpt")
    assert main(["import", str(tmp_path / "a.ckpt"), str(tmp_path / "run")]) == 2
    assert reason in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["import", str(tmp_path / "empty"), str(tmp_path / "run")]) == 2
    assert "nor of Hugging Face" in capsys.readouterr().err


class Sampled:
    """Most memory that this process has had of its own, beyond the first look: pages of files do not count."""

    def __init__(self) -> None:
        self._first, self.grown, self._ended = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)

    @staticmethod
    def _now() -> int:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    def _sample(self) -> None:
        while not self._ended.wait(0.0005):
            self.grown = max(self.grown, self._now() - self._first)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


TENSOR, NUMBER = 2**22, 32
_M_MMAP_THRESHOLD = -3


def memory_of(command: list[str]) -> int:
    """Run a command in this process, which is fresh: what earlier work has freed would be taken, or given back, unseen."""
    described = _export._module_of
    model = HuggingFaceEntry(prefix="", class_name="Toy", config="{}", generation_config=None, tied=())
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)  # what is freed goes back at once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_export, "_module_of", lambda of: dataclasses.replace(described(of), hugging_face=(model,)))
        assert commands  # imported before memory is looked at
        with Sampled() as sampled:
            assert main(command) == 0
    return sampled.grown


def test_memory_holds_a_part_or_a_shard_or_a_tensor(tmp_path: Path) -> None:
    """Of 128 MiB: parts of 8 MiB when they are imported, shards of 8 MiB for Hugging Face, single tensors for DCP."""
    src = hugging_face(tmp_path / "hf", {f"layer.{i}": torch.full((TENSOR // 4,), float(i)) for i in range(NUMBER)})
    url, size = str(tmp_path / "run"), 2 * TENSOR
    lines = {
        "import": ["import", str(src), url, "--part-size", str(size)],
        "huggingface": ["export", url, str(tmp_path / "out"), "--max-shard-size", str(size)],
        "dcp": ["export", url, str(tmp_path / "dcp"), "--format", "dcp"],
    }
    most = 0
    for name, line in lines.items():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            grown = fresh.submit(memory_of, line).result(timeout=90)
        print(f"{name}: {grown / TENSOR:.1f} tensors of {NUMBER}")
        assert grown < 4 * TENSOR
        most = max(most, grown)
    assert most > TENSOR // 2, "what was read is not seen in the memory that was looked at"
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == NUMBER // 2
