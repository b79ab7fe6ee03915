"""`moe-ckpt replay` from its command line on, by a real process; and what it answers to bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file

from inspection._runs import Small
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import StorageRefused
from lightning_moe_ckpt.fit.loggers._once import _silence
from lightning_moe_ckpt.launch import RERUN
from lightning_moe_ckpt.storage import RunStore, open_backend

SCRIPT = """\
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import SparseCheckpoint
checkpoint = SparseCheckpoint(sys.argv[1], window=2, keep=3)
if "writes" in sys.argv:
    Path(sys.argv[1], "own").write_text("mine")
train(Small(), checkpoint, steps=int(sys.argv[2]) if len(sys.argv) > 2 else 7)
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
    }
    for sentence, arguments in cases.items():
        assert main(["replay", url, *arguments]) == 2
        assert sentence in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", url, *step, "--dump", "weights", *never])
    assert "`weights` is none of gradients, activations, batch" in capfd.readouterr().err
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
        (["--step", "9"], ["7"], "ended, and its fit has not come to this step"),
        (["--step", "5", "--hook", "none:show"], ["7"], "`--hook none:show`: No module named 'none'"),
        (["--step", "5", "--set", "rate=1"], ["7"], "`--set rate=...`: there is no such value. Known are"),
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
    url = dense_run[0] if "elsewhere" in arguments else sparse_run
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
    _silence(logger, tmp_path / "scratch")
    assert isinstance(logger, CSVLogger)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.experiment.log_hparams({"lr": 1.0})
    logger.save()
    logger.finalize("success")
    assert logger.log_dir.startswith(str(tmp_path / "scratch"))
    assert not (tmp_path / "logs").exists()
