"""Standard output as the commands write to it."""

from __future__ import annotations

import sys

from rich.console import Console
from typing_extensions import override

_PIPE_WIDTH = 150
"""A file or a pipe has no width: enough for the widest table."""


class Screen(Console):
    """A console on standard output.

    Args:
        markup: whether `[green]` and the like in text are styles.
    """

    def __init__(self, *, markup: bool = True) -> None:
        super().__init__(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=markup)

    @override
    def on_broken_pipe(self) -> None:
        """Leave it to the program, whose exit status says more than the 1 of the base class."""
        raise BrokenPipeError
