"""How docstrings read: words that stand for a noun that the reader has to find. Limits, not goals.

Counted per 1,000 words of docstrings. Raise a limit only with a reason in the commit message.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from test_layering import _package_files, _parsed, statements, trees_are_let_go  # noqa: F401  # a fixture

LIMITS = {
    ("what", "who", "which"): 5.8,
    ("that", "those"): 17.0,
    ("of",): 36.1,
    ("it", "one", "they", "others"): 18.0,
}
MAX_FRAGMENTS = 0
"""Docstrings of attributes that begin with a preposition or a relative, and name nothing."""
_FRAGMENT = re.compile(r"(Of|What|Which|Who|Whose|With|By|In|On|At|From|To|For|Where|When|That|Those) ")


def _attribute_docstrings(tree: ast.AST) -> Iterator[str]:
    """Texts right behind an assignment."""
    for node in (tree, *statements(tree)):
        body = getattr(node, "body", ())
        for before, after in pairwise(body):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                text = after.value.value if isinstance(after.value, ast.Constant) else None
                yield from [text] if isinstance(text, str) else []


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in (tree, *statements(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
    yield from _attribute_docstrings(tree)


def rates(texts: Iterator[str]) -> dict[tuple[str, ...], float]:
    """How often the words of each group stand in 1,000 words."""
    words = Counter(word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text))
    return {group: sum(words[word] for word in group) / words.total() * 1000 for group in LIMITS}


def test_docstrings_name_what_they_speak_of() -> None:
    """The rates, and attributes without a noun."""
    trees = [_parsed(path) for path in _package_files()]
    found = rates(text for tree in trees for text in _docstrings(tree))
    fragments = sum(bool(_FRAGMENT.match(text)) for tree in trees for text in _attribute_docstrings(tree))
    print({"/".join(group): round(rate, 1) for group, rate in found.items()}, fragments)
    assert fragments <= MAX_FRAGMENTS
    for group, limit in LIMITS.items():
        assert found[group] <= limit, group


@pytest.mark.parametrize(("text", "rate"), [("It is one of the steps of it.", 250.0), ("Steps per window.", 0.0)])
def test_words_are_counted(text: str, rate: float) -> None:
    """`of` twice in eight words."""
    assert rates(iter([text]))[("of",)] == rate
