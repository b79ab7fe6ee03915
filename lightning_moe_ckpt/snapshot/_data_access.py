"""Notice reads and writes of parameters' `.data`: changes through it leave no other trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn


class DataAccess:
    """Count accesses to `.data` of some parameters, until `close`.

    Args:
        params: the parameters.
        before: called before each access in this process, from whichever thread.
    """

    _all: ClassVar[list[DataAccess]] = []

    def __init__(self, params: Iterable[Tensor], before: Callable[[], None] | None = None) -> None:
        self.count, self.touched = 0, set[int]()
        """Number of accesses, and identities of accessed parameters."""
        self._ids, self._before, self._pid = set(map(id, params)), before, os.getpid()
        self._all.append(self)
        nn.Parameter.data = property(_get_data, _set_data)  # type: ignore[assignment]

    def close(self) -> None:
        """Stop counting."""
        if self in self._all:
            self._all.remove(self)
            if not self._all:
                del nn.Parameter.data  # uncovers `Tensor.data`

    def accessed(self, param: Tensor) -> None:
        """Count an access to `.data` if `param` is one of the counted parameters."""
        if id(param) in self._ids:
            self.count += 1
            self.touched.add(id(param))
            if self._before is not None and self._pid == os.getpid():  # a fork copies nothing
                self._before()

    @classmethod
    def note(cls, param: Tensor) -> None:
        """Report an access to all counters."""
        for each in cls._all:
            each.accessed(param)


_DATA: Any = Tensor.data


def _get_data(param: Tensor) -> Tensor:
    DataAccess.note(param)
    data: Tensor = _DATA.__get__(param)
    return data


def _set_data(param: Tensor, data: Tensor) -> None:
    DataAccess.note(param)
    _DATA.__set__(param, data)
