"""What README tells a newcomer to type fits the code: calls, configuration, commands, links."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency

from lightning_moe_ckpt import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", README, flags=re.DOTALL | re.MULTILINE)
    assert found
    return [textwrap.dedent(text) for _, text in found]


@pytest.mark.parametrize("source", blocks("python"))
def test_calls_in_python_fit_their_signatures(source: str) -> None:
    """Imports are made; every call of what was imported binds to its signature, arguments that are literals as given."""
    tree = ast.parse(source)
    names: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    calls = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in names
    ]
    assert calls
    for call in calls:
        assert isinstance(call.func, ast.Name)
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        inspect.signature(names[call.func.id]).bind(*call.args, **keywords)


@pytest.mark.parametrize("source", blocks("yaml"))
def test_configuration_names_classes_and_arguments(source: str) -> None:
    """Each `class_path` can be imported and made with its `init_args`."""

    def made(node: object) -> int:
        if isinstance(node, list):
            return sum(map(made, node))
        if not isinstance(node, dict):
            return 0
        if "class_path" in node:
            module, _, name = node["class_path"].rpartition(".")
            getattr(importlib.import_module(module), name)(**node.get("init_args", {}))
        return ("class_path" in node) + sum(map(made, node.values()))

    assert made(yaml.safe_load(source)) > 0


def _commands() -> list[list[str]]:
    inline = re.findall(r"`((?:moe-ckpt|make) [^`<>]+)`", README)
    lines = [line for block in blocks("sh") for line in block.splitlines()] + inline
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_commands_exist(words: list[str]) -> None:
    """`make` targets are in the Makefile, and `moe-ckpt` accepts the arguments as they stand, if there are any."""

    program, *arguments = words
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program == "moe-ckpt":
        command: click.Command = cli.PROGRAM
        while isinstance(command, click.Group):
            command = command.commands[arguments.pop(0)]
        if arguments:
            command.make_context(program, arguments)
    else:
        assert program == "torchrun"


def test_links_lead_somewhere() -> None:
    """Every relative link is a file of the repository."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert all((ROOT / link).exists() for link in links)
