"""Let a logger of Lightning get each row once, in a run that trains steps again which an earlier process has logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

LineCounts: TypeAlias = "Counter[tuple[int, str]]"
"""Number of times that a key was logged under a step."""


class LoggedOnce:
    """Drop rows of one logger that are there already. The `owner` is the rank that writes; other ranks only count."""

    def __init__(self, logger: Any, *, owner: bool) -> None:
        self._logger, self._owner = logger, owner
        self.there: LineCounts = Counter()
        """Rows that will be logged again."""
        self.newest: dict[str, Any] = {"step": -1, "keys": {}}
        """Newest step of a row, and how often each key was logged under it."""
        self.has_logged = False
        """Whether this process has logged a row."""
        self._log = logger.log_metrics
        logger.log_metrics = self._log_once

    def take(self) -> dict[str, Any]:
        """Return where rows go, and counts of what was logged under the newest step."""
        raise NotImplementedError

    def restore(self, taken: Mapping[str, Any]) -> None:
        """Go on where the run's rows are."""
        raise NotImplementedError

    def start(self) -> dict[str, Any]:
        """Return where rows go, as of before the first."""
        return {**self.take(), "step": -1, "keys": {}}

    def hold(self) -> Callable[[], None]:
        """Return a function to call where all that is logged from now on will be logged again, and dropped then."""
        step, keys = self.newest["step"], dict(self.newest["keys"])

        def undo() -> None:
            since = Counter(self.newest["keys"])
            if self.newest["step"] == step:
                since.subtract(keys)
            self.there.update({(self.newest["step"], name): number for name, number in since.items()})
            self.newest = {"step": step, "keys": dict(keys)}

        return undo

    def remove(self) -> None:
        """Restore the logger's own methods."""
        self._logger.__dict__.pop("log_metrics", None)

    def wrote(self, step: int, names: Iterable[str]) -> None:
        """Note a row that the logger has got."""

    def go_on_behind(self, taken: Mapping[str, Any]) -> None:
        """Count on from what was taken."""
        self.newest = {"step": taken["step"], "keys": dict(taken["keys"])}

    def name_of(self, key: str) -> str:
        """Return the name under which the logger has a key."""
        prefix = self._logger._prefix
        return f"{prefix}{self._logger.LOGGER_JOIN_CHAR}{key}" if prefix else key

    def _log_once(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is None:
            self._log(metrics, step)
            self.has_logged = True
            return
        if step != self.newest["step"]:
            self.newest = {"step": step, "keys": {}}
        fresh = {key: value for key, value in metrics.items() if self._is_fresh(step, key)}
        if fresh:
            self._log(fresh, step)
            self.has_logged = True
            self.wrote(step, [self.name_of(key) for key in fresh])

    def _is_fresh(self, step: int, key: str) -> bool:
        name = self.name_of(key)
        self.newest["keys"][name] = self.newest["keys"].get(name, 0) + 1
        if self.there[step, name] > 0:
            self.there[step, name] -= 1
            return False
        return True
