"""What README tells a newcomer to type fits the code: calls, configuration, commands, links."""

from __future__ import annotations

import re

import pytest
from _pages import ROOT, blocks, check_command, check_links, check_python, commands

README = ROOT / "README.md"
MAX_WORDS = 700


def test_it_is_short() -> None:
    """What somebody reads who has three minutes; all else is in docs/."""
    assert len(README.read_text(encoding="utf-8").split()) <= MAX_WORDS


@pytest.mark.parametrize("source", blocks(README, "python"))
def test_calls_in_python_fit_their_signatures(source: str) -> None:
    """Imports are made; every call of what was imported binds to its signature."""
    assert check_python(source) > 0


@pytest.mark.parametrize(("words", "whole"), list(commands(README)))
def test_commands_exist(words: list[str], *, whole: bool) -> None:
    """`make` targets, options and scripts are there."""
    check_command(words, whole=whole)


def test_links_and_picture_are_there() -> None:
    """Every relative link is a file of the repository; the picture is modest."""
    assert check_links(README) > 5
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert 10**4 < (ROOT / picture).stat().st_size < 3 * 10**5
