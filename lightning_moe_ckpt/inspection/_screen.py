"""What a command answers, and standard output as commands write to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from typing_extensions import override

_PIPE_WIDTH = 150
"""A file or a pipe has no width: enough for the widest table."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found, for programs and for people."""

    document: Mapping[str, Any]
    """JSON values."""
    tables: Callable[[], Sequence[RenderableType]]
    status: int = 0
    """Exit status."""


class Screen(Console):
    """A console on standard output."""

    def __init__(self) -> None:
        super().__init__(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)

    @override
    def on_broken_pipe(self) -> None:
        """Leave it to the program, whose exit status says more than the 1 of the base class."""
        raise BrokenPipeError
