"""The site is built without a warning, and what its pages tell a reader to type fits the code."""

from __future__ import annotations

import importlib
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency
from _pages import ROOT, blocks, check_command, check_links, check_python, check_yaml, commands
from launcher import exit_after
from test_public_api import PUBLIC

from lightning_moe_ckpt.simulation import Profile

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md"))


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=page.stem) for page in pages]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """`mkdocs build --strict`, as `make docs`: links, anchors and references are checked, and nothing is downloaded."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / ".ci" / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        capture_output=True, text=True, timeout=200, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    home, api = (tmp_path / "site" / name for name in ("index.html", "api/callbacks.html"))
    assert "DifferentialCheckpoint" in api.read_text(encoding="utf-8")
    fetched = re.findall(
        r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?|png|svg))"', home.read_text(encoding="utf-8")
    )
    assert not fetched, "a reader's browser would fetch these from elsewhere"


@pytest.mark.parametrize("page", named(PAGES))
def test_python_fits_the_code(page: Path) -> None:
    """Imports are made, and calls bind to signatures."""
    for source in blocks(page, "python"):
        check_python(source)


@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "yaml")]))
def test_configuration_names_classes_and_arguments(page: Path) -> None:
    """Each `class_path` can be imported and made with its `init_args`, profiles are accepted; other documents are read."""
    for source in blocks(page, "yaml"):
        document = yaml.safe_load(source)
        if "training" in document:
            Profile.of(document)
        else:
            assert check_yaml(source) > 0 or "apiVersion" in document


@pytest.mark.parametrize("page", named([page for page in PAGES if list(commands(page))]))
def test_commands_exist(page: Path) -> None:
    """Options are the command's own, targets the Makefile's, scripts in the tree."""
    for words, whole in commands(page):
        check_command(words, whole=whole)


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    """In a checkout, too, where no site is built."""
    check_links(page)


def test_every_policy_is_explained_in_python_and_yaml() -> None:
    """One section each, with both."""
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    callbacks = [name for name in PUBLIC["lightning_moe_ckpt.callbacks"].split() if name.endswith("Checkpoint")]
    for name in callbacks:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert "```python" in section, name
        assert "```yaml" in section, name


def test_every_error_has_a_remedy() -> None:
    """A row for each class that a caller can catch."""
    text = (DOCS / "errors.md").read_text(encoding="utf-8").partition("\n## Refused")[0]
    rows = set(re.findall(r"^\| `(\w+)` \| `\w+` \|", text, flags=re.MULTILINE))
    assert rows == set(PUBLIC["lightning_moe_ckpt.errors"].split()) - {"CheckpointError"}


def test_every_public_name_has_a_reference() -> None:
    """A name that is new in the API, or gone, shows here."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    for module, names in PUBLIC.items():
        for name in set(names.split()) - {"__version__"}:
            there = f"::: {module}.{name}\n" in text + "\n" or (
                module == "lightning_moe_ckpt" and name == "MoEStrategy"
            )
            assert there or f"`{name}`" in text, f"{module}.{name}"
    for reference in re.findall(r"^::: ([\w.]+)", text, flags=re.MULTILINE):
        module, _, name = reference.rpartition(".")
        assert hasattr(importlib.import_module(module), name), reference


def test_the_public_modules_are_named() -> None:
    """All of them, each with its page."""
    text = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`\.?([a-z_]+)`(?:, |\])", text))
    assert told == {module.partition(".")[2] or module for module in PUBLIC}


def test_sections_of_papers_are_where_the_table_says() -> None:
    """Every module in the table is there."""
    text = (DOCS / "papers.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\|[^|]*\|[^|]*\| (`.*`) \|$", text, flags=re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/.]+)`", row):
            folder = name.rpartition("/")[0] or folder
            path = f"{folder}/{name}" if folder and "/" not in name else name
            assert (ROOT / "lightning_moe_ckpt" / path).exists(), path


def test_the_quickstart_runs_as_printed(tmp_path: Path) -> None:
    """Killed by SIGKILL once it has trained a while, and started again, it ends with the weights of a run left in peace; a third start has them too."""
    (source,) = [text for text in blocks(DOCS / "quickstart.md", "python") if "Trainer(" in text]
    script = tmp_path / "train.py"
    script.write_text(source.replace("max_steps=200", "max_steps=20").replace("% 20 == 0", "% 4 == 0"))
    importlib.import_module("transformers").MixtralForCausalLM  # noqa: B018  # once, for all three
    calm = _said(_started(script, "calm"), tmp_path / "calm.txt")
    killed = _started(script, "killed")
    deadline = time.monotonic() + 60
    while "step 12:" not in (tmp_path / "killed.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    resumed = _said(_started(script, "killed"), tmp_path / "killed.txt")
    assert "resumes from step" in resumed
    assert calm.splitlines()[-1].startswith("step 20: weights add up to ")
    assert calm.splitlines()[-1] == resumed.splitlines()[-1]
    assert resumed.splitlines()[-1] == _said(_started(script, "killed"), tmp_path / "killed.txt").splitlines()[-1]


def _started(script: Path, url: str) -> int:
    """Run the script in a process that has imported everything; what it prints goes to a file beside it."""
    log = (script.parent / f"{url}.txt").open("a")
    child = os.fork()
    if child == 0:
        os.chdir(script.parent)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        sys.argv = [str(script), url]
        logging.getLogger().handlers.clear()  # pytest's, which would take what the script wants on the terminal
        warnings.simplefilter("ignore")
        exit_after(lambda: runpy.run_path(str(script), run_name="__main__"))
    log.close()
    return child


def _said(child: int, log: Path) -> str:
    _, status = os.waitpid(child, 0)
    text = log.read_text()
    assert status == 0, text
    return text
