"""The command line itself: help that waits for nothing, suggestions, completion and the version."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from benchmarks import quality_fit, recovery
from benchmarks.__main__ import PROGRAM as EVIDENCE
from lightning_moe_ckpt.cli import BENCH, PROGRAM, main

_HELP_OF_EVERYTHING = """
import sys
sys.argv = ["/usr/bin/moe-ckpt"]
from lightning_moe_ckpt.cli import BENCH, PROGRAM, main
for name in ["", *PROGRAM.commands, *(f"bench {name}" for name in BENCH.commands)]:
    assert main([*name.split(), "--help"]) == 0
heavy = {"torch", "lightning", "numpy", "fsspec", "obstore", "rich"} & set(sys.modules)
assert not heavy, heavy
import lightning_moe_ckpt.inspection.commands
training = {"lightning", "torchmetrics"} & set(sys.modules)
assert not training, training
"""


def test_help_imports_nothing_heavy_and_a_look_nothing_of_training() -> None:
    """Of the program and of every command: seconds go into `import torch`, more into Lightning and torchmetrics."""
    done = subprocess.run([sys.executable, "-c", _HELP_OF_EVERYTHING], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"Usage: moe-ckpt") == 1 + len(PROGRAM.commands) + len(BENCH.commands)


@pytest.mark.parametrize(
    ("argv", "meant"),
    [(["inspct", "url"], "inspect"), (["verify", "url", "--stp", "3"], "--step"), (["bench", "overhed"], "overhead")],
)
def test_misspelled_words_are_answered_with_what_is_meant(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Did you mean" in said
    assert meant in said.partition("Did you mean")[2]


@pytest.mark.parametrize("argv", [["--monitor-interval", "3"], ["--logs_specs", "x"], ["--run-path"]])
def test_options_of_torchrun_without_a_meaning_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason, in either spelling."""
    with pytest.raises(SystemExit) as ended:
        main(["run", *argv, "train.py"])
    assert ended.value.code == 2
    assert f"{argv[0].replace('_', '-')} is torchrun's, and `moe-ckpt run` has none: " in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lines of `--help` about completion set up."""
    for words, last, wanted in (
        ("moe-ckpt ins", "ins", "inspect"),
        ("moe-ckpt gc --keep-l", "--keep-l", "--keep-last"),
    ):
        monkeypatch.setenv("_MOE_CKPT_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", last if shell == "fish" else str(words.count(" ")))
        with pytest.raises(SystemExit):
            main([])
        assert wanted in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s4://bucket/run", "`s3://bucket/run`"),
        ("flie:///tmp/run", "`file:///tmp/run`"),
        ("s3:/bucket/run", "`s3://bucket/run`"),
    ],
)
def test_a_misspelled_url_is_answered_with_what_is_meant(
    url: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole URL, to be copied."""
    assert main(["ls", url]) == 2
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_the_package_is_the_command_as_a_module() -> None:
    """`python -m` where no program is on the path; it waits for nothing heavy either."""
    asked = [sys.executable, "-m", "lightning_moe_ckpt", "--help"]
    done = subprocess.run(asked, capture_output=True, timeout=60, check=True, text=True)
    assert done.stdout.startswith("Usage: moe-ckpt")
    seen = [sys.executable, "-X", "importtime", *asked[1:]]
    times = subprocess.run(seen, capture_output=True, timeout=60, check=True, text=True).stderr
    assert "click" in times
    assert not [
        line for line in times.splitlines() if line.split("|")[-1].strip() in {"torch", "lightning", "rich", "numpy"}
    ]


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, for a report."""
    assert main(["--version"]) == 0
    assert version("lightning-moe-ckpt") in capsys.readouterr().out


def test_choices_are_those_of_the_benchmarks() -> None:
    """They stand in the command line too, which imports no benchmark."""
    defaults = {param.name: param.default for param in EVIDENCE.commands["recovery"].params}
    assert defaults["systems"] == [*dict.fromkeys(system for system, _ in recovery.CASES)]
    defaults = {param.name: param.default for param in EVIDENCE.commands["quality"].params}
    lossy = [case.system for case in quality_fit.CASES if case.loss != "nothing"]
    assert defaults["quality_policies"] == [*dict.fromkeys(lossy)]
