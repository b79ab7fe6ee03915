"""Define the answer of a command, and the console that it is printed on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from typing_extensions import override

_PIPE_WIDTH = 150
"""Width for a file or a pipe, enough for the widest table."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command, as JSON values and as tables."""

    document: Mapping[str, Any]
    """JSON values."""
    tables: Callable[[], Sequence[RenderableType]]
    status: int = 0
    """Exit status."""


class Screen(Console):
    """Console on standard output."""

    def __init__(self) -> None:
        super().__init__(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)

    @override
    def on_broken_pipe(self) -> None:
        """Leave a broken pipe to the program, whose exit status says more than the base class's 1."""
        raise BrokenPipeError
