"""Keep loggers of a training that only repeats steps from writing, for `moe-ckpt replay`.

Each logger gets a subclass of its own class, so that code that asks for its kind, or its `experiment`, finds them.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

_READS = {"name", "version", "group_separator", "save_dir", "root_dir", "log_dir", "experiment"}


def silence_loggers(folder: Path) -> None:
    """Let the loggers of every trainer of this process write nothing; user code finds `folder` as their folder. Call once."""
    for name in () if hasattr(Trainer.fit, "is_silent") else ("__init__", "fit"):
        setattr(Trainer, name, _silencing(getattr(Trainer, name), folder))


def _silencing(method: Any, folder: Path) -> Any:
    @functools.wraps(method)
    def wrapped(self: Trainer, *args: Any, **options: Any) -> Any:
        for logger in self.loggers if method.__name__ == "fit" else ():
            _silence(logger, folder)
        result = method(self, *args, **options)
        for logger in self.loggers:  # a script may log before it trains
            _silence(logger, folder)
        return result

    vars(wrapped)["is_silent"] = True
    return wrapped


def _silence(logger: Logger, folder: Path) -> None:
    cls = type(logger)
    if hasattr(cls, "is_silent"):
        return
    kept = {*vars(object), *_READS}
    writes = [
        name
        for name, member in inspect.getmembers_static(cls)
        if not name.startswith("_") and name not in kept and inspect.isfunction(member)
    ]
    members: dict[str, Any] = dict.fromkeys(writes, lambda *_, **__: None)
    members |= {name: property(lambda _: folder) for name in ("save_dir", "root_dir") if hasattr(cls, name)}
    experiment = DummyLogger().experiment
    members |= {"experiment": property(lambda _: experiment), "is_silent": True, "__module__": cls.__module__}
    logger.__class__ = type(cls.__name__, (cls,), {**members, "__qualname__": cls.__qualname__})
