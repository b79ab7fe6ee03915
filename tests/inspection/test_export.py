"""`moe-ckpt export`: what is written is what was trained, and what cannot be is refused."""

from __future__ import annotations

import dataclasses
import os
import stat
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign._optimizers import RowByRow
from launcher import run_world
from lightning.pytorch import seed_everything
from safetensors.torch import load_file
from torch import Tensor

from inspection._runs import FEATURES, SmallMoE, train
from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt
from lightning_moe_ckpt.inspection import export, verify
from lightning_moe_ckpt.inspection._assemble import Assembler
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.storage import RankMarker, RunView, open_backend


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """The same names, types and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_safetensors_hold_parameters_and_buffers(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """Bit for bit as the model ended."""
    url, module = dense_run
    assert main(["export", url, str(tmp_path / "m.safetensors")]) == 0
    assert same(load_file(tmp_path / "m.safetensors"), module.state_dict())


def test_an_earlier_step_is_another_state(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """`--step` decides."""
    url, module = dense_run
    assert main(["export", url, str(tmp_path / "m.safetensors"), "--step", "4"]) == 0
    assert not same(load_file(tmp_path / "m.safetensors"), module.state_dict())


def test_a_lightning_checkpoint_is_loaded_by_lightning(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """By `load_from_checkpoint`, which also hands over what the module had saved, and without running code."""
    url, module = dense_run
    out = tmp_path / "m.ckpt"
    assert main(["export", url, str(out)]) == 0
    content = torch.load(out, weights_only=True)
    assert (content["global_step"], content["seen"]) == (6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = type(module).load_from_checkpoint(out)
    assert same(loaded.state_dict(), module.state_dict())
    assert loaded.seen == module.seen == 6


def test_optimizer_state_is_written_beside(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """`fqn/key`, with a scalar where the optimizer keeps one."""
    url, module = dense_run
    assert main(["export", url, str(tmp_path / "m.safetensors"), "--optimizer"]) == 0
    states = module.trainer.optimizers[0].state
    expected = {f"{name}/{key}": value for name, p in module.named_parameters() for key, value in states[p].items()}
    assert same(load_file(tmp_path / "m.optimizer.safetensors"), expected)


def test_experts_of_all_ranks_are_put_together(
    sharded_run: tuple[str, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path
) -> None:
    """As Lightning's own checkpoint of the run would have them, weights and moments."""
    url, weights, averages = sharded_run
    assert main(["export", url, str(tmp_path / "m.safetensors"), "--optimizer"]) == 0
    assert same(load_file(tmp_path / "m.safetensors"), weights)
    state = load_file(tmp_path / "m.optimizer.safetensors")
    assert weights["moe.w1"].shape[0] == 4
    assert same({name.removesuffix("/exp_avg"): state[name] for name in state if name.endswith("exp_avg")}, averages)


class Factored(SmallMoE):
    """Trains with statistics of rows and of columns; those of columns of `[E, f]` are of a rank's experts together."""

    def __init__(self, *, biases: bool) -> None:
        super().__init__()
        self.biases = biases

    def configure_model(self) -> None:
        self.moe = self.moe or MoELayer(FEATURES, 8, 6)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = dict(self.named_parameters())
        return RowByRow([params[name] for name in params if self.biases or not name.startswith("moe.b")], lr=1e-2)


@pytest.mark.parametrize("biases", [False, True])
def test_statistics_of_rows_are_put_together_and_others_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *, biases: bool
) -> None:
    """Experts of three ranks, each of which stores its stack whole. What is of one rank's experts has no place in a single file."""
    url, out = str(tmp_path / "run"), tmp_path / "m.safetensors"

    def work(rank: int) -> dict[str, Tensor]:
        seed_everything(1, verbose=False)
        module = Factored(biases=biases)
        strategy = MoEStrategy(expert_parallel=3)
        trainer = train(module, SparseCheckpoint(url, window=2), steps=3, devices=3, strategy=strategy)
        param = dict(module.named_parameters())["moe.w1"]
        return {f"moe.w1/{key}": trainer.optimizers[0].state[param][key] for key in ("mean", "rows", "columns")}

    kept = run_world(3, work, timeout=timedelta(seconds=90), process_group=False)
    assert verify(open_backend(url)).sound
    ended = main(["export", url, str(out), "--optimizer"])
    if biases:
        said = capsys.readouterr().err
        assert (ended, "`moe.b1/columns` differs between ranks" in said) == (2, True)
        assert main(["export", url, str(out)]) == 0
    else:
        assert ended == 0
        found = load_file(tmp_path / "m.optimizer.safetensors")
        expected = {name: torch.cat([each[name] for each in kept]) for name in kept[0]}
        assert same({name: found[name] for name in expected}, expected)


def test_a_sparse_generation_is_refused_with_the_way_out(
    capsys: pytest.CaptureFixture[str], sparse_run: str, tmp_path: Path
) -> None:
    """It is several steps in one."""
    out = tmp_path / "m.ckpt"
    assert main(["export", sparse_run, str(out), "--step", "6"]) == 2
    err = capsys.readouterr().err
    assert "is sparse" in err
    assert "--step 7" in err
    assert f"`moe-ckpt densify {open_backend(sparse_run).url} -- SCRIPT ARGS`" in err
    assert main(["export", sparse_run, str(out), "--step", "7"]) == 0


def test_names_can_be_left_out_and_added(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """Buffers that are not persistent, and the second name of a tied parameter."""
    out = tmp_path / "m.safetensors"
    argv = ["export", dense_run[0], str(out), "--leave-out", "sc*", "--tie", "head.weight=net.1.weight"]
    assert main(argv) == 0
    found = load_file(out)
    assert "scale" not in found
    assert torch.equal(found["head.weight"], found["net.1.weight"])
    assert main([*argv, "--force", "--tie", "x=nothing"]) == 2


@pytest.mark.parametrize(
    ("out", "words"), [("m.bin", "must end in"), ("no/m.ckpt", "not a folder"), ("there.ckpt", "exists")]
)
def test_where_to_write_is_checked_first(
    capsys: pytest.CaptureFixture[str], dense_run: tuple[str, Any], tmp_path: Path, out: str, words: str
) -> None:
    """A file that exists stays, unless `--force`."""
    (tmp_path / "there.ckpt").write_bytes(b"mine")
    assert main(["export", dense_run[0], str(tmp_path / out)]) == 2
    assert words in capsys.readouterr().err
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]
    assert main(["export", dense_run[0], str(tmp_path / "there.ckpt"), "--force"]) == 0


def test_damaged_parameters_are_not_exported(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """Every record's digest is checked on the way, and no file is left."""
    backend = open_backend(str(tmp_path / "copy"))
    source = open_backend(dense_run[0])
    for entry in source.list(""):
        data = bytearray(source.get(entry.key))
        if entry.key.startswith("snap/000000000006") and entry.key.endswith(".safetensors"):
            marker = markers_of(dense_run[0])[0]
            data[next(r.offset for r in marker.segments[0].records if r.state_key == "param")] ^= 1
        backend.put(entry.key, bytes(data))
    with pytest.raises(Corrupt, match="digest"):
        export(backend, tmp_path / "m.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def markers_of(url: str) -> list[RankMarker]:
    """Of the newest generation."""
    view = RunView.open(open_backend(url))
    commit = view.generations()[0].commit
    assert commit is not None
    return [view.read_marker(commit, rank) for rank in range(commit.world_size)]


def test_parts_that_do_not_add_up_are_refused(sharded_run: tuple[str, Any, Any]) -> None:
    """Two different parts for one place, or none at all, is never a tensor; copies are."""
    markers = markers_of(sharded_run[0])
    backend = open_backend(sharded_run[0])
    segment = markers[1].segments[0]
    others = tuple(dataclasses.replace(record, digest="0" * 32) for record in segment.records)
    different = dataclasses.replace(markers[1], segments=(dataclasses.replace(segment, records=others),))
    with pytest.raises(ConfigurationError, match="written by two ranks"):
        Assembler(backend, [*markers, different]).read("moe.w1")
    twice = Assembler(backend, [*markers, markers[1]]).read("moe.w1")
    assert torch.equal(twice, Assembler(backend, markers).read("moe.w1"))
    with pytest.raises(ConfigurationError, match="nobody wrote element"):
        Assembler(backend, markers[:1]).read("moe.w1")


def test_state_that_is_not_there_yet_is_told(sharded_run: tuple[str, Any, Any]) -> None:
    """Zeros beside what is there, with a note; nothing at all is left out, with a note."""
    markers = markers_of(sharded_run[0])

    def without(marker: RankMarker) -> RankMarker:
        segment = marker.segments[0]
        records = tuple(dataclasses.replace(r, present=r.state_key in {"param", "present"}) for r in segment.records)
        return dataclasses.replace(marker, segments=(dataclasses.replace(segment, records=records),))

    backend = open_backend(sharded_run[0])
    parts = Assembler(backend, [markers[0], without(markers[1])])
    moments = parts.optimizer()["moe.w1/exp_avg"].read()
    assert moments[:2].any()
    assert not moments[2:].any()
    assert "zeros there" in parts.notes[0]
    parts = Assembler(backend, [without(marker) for marker in markers])
    assert parts.optimizer() == {}
    assert "left out" in parts.notes[0]


@pytest.mark.parametrize(("umask", "rights"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
@pytest.mark.parametrize("name", ["out.safetensors", "out.ckpt"])
def test_rights_of_files_follow_the_umask(
    umask: int, rights: int, name: str, dense_run: tuple[str, object], tmp_path: Path
) -> None:
    """As of any other program's files: colleagues may read them where they may read what `cp` makes."""
    before = os.umask(umask)
    try:
        assert main(["export", dense_run[0], str(tmp_path / name)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == rights
