"""A replacement put into a process, to show what breaks without the original, or to be told when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """A replacement put into every process of a life, to show what breaks without the original."""

    module: str
    attribute: str
    """Dotted path inside the module, e.g. `Session.seal`."""
    replacement: Any

    def apply(self) -> Callable[[], None]:
        """Replace, until what is returned is called.

        Raises:
            AttributeError: there is nothing to replace.
        """
        *path, name = self.attribute.split(".")
        owner = reduce(getattr, path, importlib.import_module(self.module))
        original = getattr(owner, name)
        setattr(owner, name, self.replacement)
        return partial(setattr, owner, name, original)
