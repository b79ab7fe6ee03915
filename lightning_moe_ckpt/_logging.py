"""Loggers whose lines say which rank they are of, and with which all ranks together can say a thing once.

Handlers are the user's: nothing is configured here, and records go the ordinary way, to the handlers of the root logger
or, as for every library, warnings to standard error where there are none.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class RankLogger(_Adapter):
    """A logger of this package: `[rank 1] ` stands before every message, where there are several ranks.

    With `alike=True` a line that all ranks would say alike is said by rank 0 only.
    """

    _known: tuple[int, int] | None = None
    """Rank and number of ranks, also while a recovery forms groups anew; one for all loggers."""

    @override
    def log(self, level: int, msg: object, *args: object, alike: object = False, **kwargs: Any) -> None:
        rank, world_size = self.place()
        if (alike and rank != 0) or not self.isEnabledFor(level):
            return
        said = f"[rank {rank}] {msg}" if world_size > 1 else msg
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.logger.log(level, said, *args, **kwargs)

    @classmethod
    def place(cls) -> tuple[int, int]:
        """Return rank and number of ranks of this process; 0 and 1 as long as there are no process groups."""
        torch = sys.modules.get("torch")  # nothing waits for torch in order to log
        distributed = getattr(torch, "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            RankLogger._known = distributed.get_rank(), distributed.get_world_size()
        return RankLogger._known or (0, 1)


def rank_logger(name: str) -> RankLogger:
    """Return the logger of a module."""
    return RankLogger(logging.getLogger(name), {})
