"""`moe-ckpt replay` from its command line on, by a real process; and what it answers to bad input."""

from __future__ import annotations

import re
from collections import UserDict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file

from inspection._runs import Small
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import ConfigurationError, StorageRefused
from lightning_moe_ckpt.fit._rerun import Rerun, StepDump, _expect_fits
from lightning_moe_ckpt.fit.loggers._once import silence
from lightning_moe_ckpt.launch import RERUN, RerunRequest
from lightning_moe_ckpt.recovery import stored_losses
from lightning_moe_ckpt.storage import RunStore, RunView, open_backend

SCRIPT = """\
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from lightning.pytorch import Callback
from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import SparseCheckpoint
class Keeps(Callback):
    def setup(self, trainer, pl_module, stage):
        Keeps.trainer = trainer
checkpoint = SparseCheckpoint(sys.argv[1], window=2, keep=3)
if "writes" in sys.argv:
    Path(sys.argv[1], "own").write_text("mine")
try:
    train(Small(), checkpoint, Keeps(), steps=int(sys.argv[2]) if len(sys.argv) > 2 else 7)
finally:
    Keeps.trainer.save_checkpoint("late.ckpt")
    Keeps.trainer.strategy.checkpoint_io.save_checkpoint({{}}, "own.ckpt")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    return str(path)


def listed(url: str) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path(url).rglob("*"))


def test_steps_are_run_again_and_nothing_is_written(
    sparse_run: str, script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are compared, parts stored by name, a hook is called, and from --set on other losses are expected."""
    monkeypatch.chdir(tmp_path)
    Path("looks.py").write_text("def show(t, m, b, i): print('hook at', t.global_step, type(m).__name__, len(b), i)\n")
    before = listed(sparse_run)
    options = ["--dump", "batch,gradients", "--out", "parts", "--hook", "looks:show"]
    assert main(["replay", sparse_run, "--step", "5", *options, "--", script, sparse_run]) == 0
    said = capfd.readouterr()
    assert re.search(r"^ *5 +0 +\S+ +the same bits$", said.out, re.MULTILINE), said.out
    assert "generation 4 was restored; 3 losses compared with the run's, 0 differ\n2 files in " in said.out
    assert "hook at 5 Small 1 5\n" in said.err
    assert load_file("parts/step-5.rank-0.gradients.safetensors").keys() == dict(Small().named_parameters()).keys()
    assert listed(sparse_run) == before
    assert list(tmp_path.glob("*.ckpt")) == []


@dataclass(slots=True)
class Pair:
    """A batch as users write it."""

    x: torch.Tensor
    names: list[str]


def test_a_batch_of_any_class_is_stored(tmp_path: Path) -> None:
    """By the names of its fields or keys."""
    dump = StepDump(["batch"], tmp_path, 0)
    dump.batch_begins(Small(), UserDict({"pair": Pair(torch.ones(2), ["a"])}))
    (path,) = dump.ends(3)
    assert [(name, each.tolist()) for name, each in load_file(path).items()] == [("0/pair/x", [1.0, 1.0])]


def test_a_hook_may_draw_and_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it random numbers and modes of modules are the step's own, and the end has the same bits."""
    monkeypatch.chdir(tmp_path)
    lines = ["import torch", "def look(t, m, b, i):", "    m.eval()", "    print(torch.rand(3), m(b[0]))"]
    Path("draws.py").write_text("\n".join([*lines, ""]))
    request = RerunRequest(tag="", name="", results=str(tmp_path / "r"), step=1, until=9, hook="draws:look")
    ends = list[dict[str, torch.Tensor]]()
    for others in ((), (Rerun(request, "memory://"),)):
        seed_everything(1, verbose=False)
        module = tiny.with_dropout()
        tiny.fit(module, tiny.rows(tiny.waves(8, 4), 2), *others, max_steps=4)
        ends.append(module.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("lr", "abc", "found text, wanted a number"),
        ("betas", [0.9], "found 1 numbers, wanted 2 numbers"),
        ("amsgrad", 1, "found a number, wanted true or false"),
        ("gradient_clip_val", "abc", "found text, wanted None or a number"),
        ("gradient_clip_algorithm", "abc", "found text, wanted norm or value"),
        ("rate", 1, "there is no such value. Known are amsgrad, betas"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: object, wanted: str) -> None:
    """With its name, what was found and what is wanted; one of the same kind is taken."""
    optimizer = tiny.LEARN(Small().parameters())
    trainer: Any = SimpleNamespace(optimizers=[optimizer])
    with pytest.raises(ConfigurationError, match=rf"`--set {name}=.*`: {re.escape(wanted)}"):
        _expect_fits({name: value}, trainer)
    _expect_fits({"lr": 1, "betas": [0.8, 0.9], "foreach": True, "gradient_clip_val": None}, trainer)


def test_the_last_step_of_a_fit_has_its_loss(sparse_run: str) -> None:
    """Which replays of it are compared with."""
    with closing(open_backend(sparse_run)) as backend:
        (newest, *_) = RunView.open(backend).generations()
        assert newest.commit is not None
        (file,) = RunView.open(backend).read_marker(newest.commit, 0).segments
        assert (file.step, len(stored_losses(backend, file))) == (7, 1)


def test_bad_input_is_answered_before_anything_starts(
    dense_run: tuple[str, Small], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a line, with what can be done."""
    url, _ = dense_run
    step, never = ["--step", "5"], ["--", "no such command"]
    cases = {
        "Steps from 4 on can be: generations are kept of 4, 6.": ["--step", "3", *never],
        "`--until 4` is before `--step 5`.": [*step, "--until", "4", *never],
        "`--dump` needs `--out`": [*step, "--dump", "batch", *never],
        "is inside of the run's URL": [*step, "--dump", "batch", "--out", f"{url}/parts", *never],
        "`no such command` cannot be started": [*step, *never],
        "`--hook looks`: give MODULE:FUNCTION": [*step, "--hook", "looks", *never],
        "`--hook nowhere.looks:show`: give MODULE:FUNCTION": [*step, "--hook", "nowhere.looks:show", *never],
    }
    for sentence, arguments in cases.items():
        assert main(["replay", url, *arguments]) == 2
        assert sentence in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", url, *step, "--dump", "weights", *never])
    assert "`weights` is none of gradients, activations, batch" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["audit", url, "--from", "-3", *never])
    assert "'--from': -3 is not in the range" in capfd.readouterr().err
    assert main(["replay", str(tmp_path), *step, *never]) == 2
    assert "holds no run" in capfd.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    [
        (
            ["--step", "5"],
            ["7", "elsewhere"],
            "`moe-ckpt replay` was given another URL than the callback of this script",
        ),
        (["--step", "5"], ["7", "writes"], "is the run's, and `moe-ckpt replay` changes nothing there"),
        (["--step", "5"], ["7", "nowhere"], "`moe-ckpt replay` was given another URL than the callback of this script"),
        (["--step", "9"], ["7"], "COMMAND has trained up to step 6, and ended there"),
        (["--step", "5", "--set", "lr=abc"], ["7"], "`--set lr=abc`: found text, wanted a number"),
    ],
)
def test_a_script_that_cannot_do_it_is_told(
    sparse_run: str,
    dense_run: tuple[str, Small],
    script: str,
    case: tuple[list[str], list[str], str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And nothing is changed."""
    options, arguments, said = case
    url = dense_run[0] if "elsewhere" in arguments else f"{sparse_run}-none" if "nowhere" in arguments else sparse_run
    before = listed(sparse_run)
    assert main(["replay", sparse_run, *options, "--", script, url, *arguments]) == 2
    assert said in capfd.readouterr().err
    assert listed(sparse_run) == before


def test_backends_refuse_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all processes of a replay, whatever opens them; they read as ever."""
    url = str(tmp_path)
    backend = open_backend(url)
    backend.put("snap/a", b"a")
    monkeypatch.setenv(RERUN, "{}")
    only_read = open_backend(url)
    assert only_read.get("snap/a") == b"a"
    for verb, arguments in (("put", ("b", b"")), ("create", ("b", b"")), ("delete", ("snap/a",)), ("sweep", ("",))):
        with pytest.raises(StorageRefused, match="changes nothing that is stored"):
            getattr(only_read, verb)(*arguments)
    with pytest.raises(StorageRefused, match="changes nothing"):
        RunStore.open(only_read, resume="auto")
    assert [each.key for each in backend.list("")] == ["snap/a"]


def test_loggers_write_nothing(tmp_path: Path) -> None:
    """They are still of their kind, and what a script asks them for is there."""
    logger = CSVLogger(tmp_path / "logs", name="mine")
    silence(logger, tmp_path / "scratch")
    assert isinstance(logger, CSVLogger)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.experiment.log_hparams({"lr": 1.0})
    logger.save()
    logger.finalize("success")
    assert logger.log_dir.startswith(str(tmp_path / "scratch"))
    assert not (tmp_path / "logs").exists()
