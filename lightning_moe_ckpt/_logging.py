"""Loggers with the rank in every line, and lines that all ranks together log once.

Handlers are the user's: nothing is configured here, and records go the ordinary way, to the handlers of the root logger
or, as for every library, warnings to standard error where there are none. A line that reaches a terminal goes above the
progress bar there.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
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
        with _above_bars(self.logger):
            self.logger.log(level, said, *args, **kwargs)

    @classmethod
    def place(cls) -> tuple[int, int]:
        """Return rank and number of ranks of this process; 0 and 1 as long as there are no process groups."""
        torch = sys.modules.get("torch")  # nothing waits for torch in order to log
        distributed = getattr(torch, "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            RankLogger._known = distributed.get_rank(), distributed.get_world_size()
        return RankLogger._known or (0, 1)


@contextlib.contextmanager
def _above_bars(logger: logging.Logger) -> Iterator[None]:
    """Let handlers that write to a terminal write above the bars of tqdm and rich that stand there."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    # Rich has replaced these streams, and handlers that were made before do not know.
    proxies = {getattr(each, "rich_proxied_file", None): each for each in (sys.stdout, sys.stderr)}
    proxies.pop(None, None)
    with contextlib.ExitStack() as stack:
        if _has_bars(tqdm) and not logger.hasHandlers():
            stack.enter_context(tqdm.external_write_mode())  # for logging.lastResort
        known: logging.Logger | None = None if tqdm is None and not proxies else logger
        while known is not None:
            for handler in known.handlers:
                if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
                    stack.enter_context(_held(handler, proxies, tqdm))
            known = known.parent if known.propagate else None
        yield


@contextlib.contextmanager
def _held(handler: logging.StreamHandler[Any], proxies: Mapping[object, Any], tqdm: Any) -> Iterator[None]:
    """Let a handler write to the proxy of its stream or above the bars of tqdm, if it has a terminal."""
    with handler.lock or contextlib.nullcontext():
        stream = handler.stream
        above = proxies.get(stream) or (_AboveBars(stream, tqdm) if tqdm is not None and _is_terminal(stream) else None)
        if above is not None:
            handler.setStream(above)
        try:
            yield
        finally:
            if above is not None:
                handler.setStream(stream)


class _AboveBars:
    """A terminal whose tqdm bars are removed during other writes.

    Their lock is taken within the handler's, as handlers do that write by `tqdm.write`.
    """

    def __init__(self, stream: Any, tqdm: Any) -> None:
        self._stream, self._tqdm, self.flush = stream, tqdm, stream.flush

    def write(self, text: str) -> None:
        with self._tqdm.external_write_mode() if _has_bars(self._tqdm) else contextlib.nullcontext():
            self._stream.write(text)
            self._stream.flush()


def _has_bars(tqdm: Any) -> bool:
    return any(_is_terminal(each.fp) for each in list(getattr(tqdm, "_instances", ())))


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # nothing that can be one, or closed
        return False


def rank_logger(name: str) -> RankLogger:
    """Return the logger of a module."""
    return RankLogger(logging.getLogger(name), {})
