"""Replace attributes in a process, to show what breaks without the original, or to observe calls."""

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
        """Replace the attribute and return a function that undoes it.

        Raises:
            AttributeError: the attribute does not exist.
        """
        *path, name = self.attribute.split(".")
        owner = reduce(getattr, path, importlib.import_module(self.module))
        original = getattr(owner, name)
        setattr(owner, name, self.replacement)
        return partial(setattr, owner, name, original)
