"""See to it when `.data` of parameters is asked for, or set: what is changed through it leaves no other trace."""

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
        """Accesses, and identities of the parameters that they were to."""
        self._ids, self._before, self._pid = set(map(id, params)), before, os.getpid()
        self._all.append(self)
        nn.Parameter.data = property(_get_data, _set_data)  # type: ignore[assignment]

    def close(self) -> None:
        """Stop to count."""
        if self in self._all:
            self._all.remove(self)
            if not self._all:
                del nn.Parameter.data  # what `Tensor` has is seen again

    def accessed(self, param: Tensor) -> None:
        """Count an access to `.data` of any parameter, if it is one of these."""
        if id(param) in self._ids:
            self.count += 1
            self.touched.add(id(param))
            if self._before is not None and self._pid == os.getpid():  # a fork has nobody who copies
                self._before()

    @classmethod
    def note(cls, param: Tensor) -> None:
        """Tell all who count."""
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
