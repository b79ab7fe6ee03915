"""Check what pages tell a reader to type against the code: calls, configuration, commands, links."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml  # type: ignore[import-untyped]  # it has no types, and stubs are not a dependency

from lightning_moe_ckpt import cli

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^ *```(\w+)[^\n]*\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
PROGRAMS = {
    "torchrun", "python", "python3", "pip", "until", "kill", "export", "srun", "head=$(scontrol", "cp", "mkdir", "cd",
}  # fmt: skip
"""Programs whose arguments are not looked at, besides those that have rules of their own."""


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in any of these languages, without their indentation."""
    return [
        textwrap.dedent(text)
        for language, text in _BLOCK.findall(page.read_text(encoding="utf-8"))
        if language in languages
    ]


def check_python(source: str) -> int:
    """Make the imports, and bind every call of what was imported to its signature, arguments that are literals as given.

    Returns:
        Number of names of this package that were imported.
    """
    tree = ast.parse(source)
    names: dict[str, Any] = {}
    own = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
            own += len(node.names) if str(node.module).startswith("lightning_moe_ckpt") else 0
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names):
            continue
        called = names[call.func.id]
        if str(getattr(called, "__module__", "")).startswith(("lightning_moe_ckpt", "lightning.")):
            inspect.signature(called).bind(*call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})
    return own


def check_yaml(source: str) -> int:
    """Make every `class_path` with its `init_args`; returns how many there were."""

    def made(node: object) -> int:
        if isinstance(node, list):
            return sum(map(made, node))
        if not isinstance(node, dict):
            return 0
        if "class_path" in node:
            _make(node)
        return ("class_path" in node) + sum(map(made, node.values()))

    return made(yaml.safe_load(source))


def _make(node: dict[str, Any]) -> object:
    module, _, name = node["class_path"].rpartition(".")
    arguments = {
        key: _make(value) if isinstance(value, dict) and "class_path" in value else value
        for key, value in node.get("init_args", {}).items()
    }
    return getattr(importlib.import_module(module), name)(**arguments)


def commands(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Yield the words of every command on a page, and whether it is one of a shell block: text may leave arguments out."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`((?:moe-ckpt|make) [^`<>]+)`", text)
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    for line, whole in [*((line, True) for line in lines), *((line, False) for line in inline)]:
        words = shlex.split(line, comments=True)
        # What a shell does with a command, and what a batch system does with it.
        for sign in ("|", ">", "&"):
            words = words[: words.index(sign)] if sign in words else words
        if words and words[0] == "srun":
            words = words[1:]
        if words and words[0] != ".":
            yield words, whole


def check_command(words: list[str], *, whole: bool) -> None:
    """`make` targets are in the Makefile, scripts in the tree, and `moe-ckpt` accepts the arguments as they stand, if there are any."""
    program, *arguments = words
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), words
    elif program == "moe-ckpt":
        command: click.Command = cli.PROGRAM
        while isinstance(command, click.Group) and arguments:
            command = command.commands[arguments.pop(0)]
        if whole or arguments:
            with contextlib.nullcontext() if whole else contextlib.suppress(click.MissingParameter):
                command.make_context(program, arguments)
    elif program == "python" and arguments and arguments[0].startswith("examples/"):
        files = [ROOT / word for word in arguments if word.startswith("examples/")]
        assert all(path.exists() for path in files), words
    elif "=" not in program:
        assert program in PROGRAMS, words


def check_links(page: Path) -> int:
    """Every relative link leads to a file; returns how many there were."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link and not link.startswith("#")]
    for link in links:
        assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"
    return len(links)
