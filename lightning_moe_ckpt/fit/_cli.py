"""End errors of LightningCLI about our classes with a sentence of ours.

For a misspelt key, or a value of a wrong type, LightningCLI lists all types tried, over dozens of lines, and it wraps a
constructor's reason for refusing a value. So its parser's messages get a last line with the likely meaning, and our own
errors are raised unwrapped. Nothing here imports `lightning.pytorch.cli`, which needs jsonargparse: its parser is
changed when imported by other code, before this package or after.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any

from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.parallel._groups import with_causes

_PACKAGE = "lightning_moe_ckpt"
_CLASS = re.compile(rf"\b({_PACKAGE}(?:\.\w+)*)\.([A-Z]\w+)")
_UNKNOWN = re.compile(
    r"(?:Option|Key|Group key) '([\w.]+)' is not (?:accepted|expected)|Unrecognized arguments?: .*?--[\w.]*?(\w+)="
)
_WRONG = re.compile(
    rf"class_path '({_PACKAGE}[\w.]*)\.(\w+)':\s+Parser key \"(\w+)\":\n(?:(?!class_path).)*?(?:Got|Given) value: ([^\n]*)",
    re.DOTALL,
)
"""A class of ours, its argument and the value given, if nothing within the argument is to blame."""
_IN_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "text", timedelta: "a time", NoneType: "null"
}  # fmt: skip

_CLI = "lightning.pytorch.cli"


def explain_errors() -> None:
    """Let LightningCLI end its errors about our classes with our remedy, now or once it is imported. May be called again."""
    if _CLI in sys.modules:
        _explain(sys.modules[_CLI])
    elif not any(isinstance(each, _Awaiting) for each in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting())


class _Awaiting(MetaPathFinder):
    """Finder without modules: when LightningCLI is imported, explains its errors and removes itself."""

    @override
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != _CLI:
            return None
        sys.meta_path.remove(self)
        if (spec := importlib.util.find_spec(fullname)) is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _explain(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _explain(module: ModuleType) -> None:
    parser = getattr(module, "LightningArgumentParser", None)
    if parser is None or not hasattr(parser, "error") or hasattr(parser, "explains_moe_ckpt"):
        return  # an empty class without jsonargparse; LightningCLI names the missing package
    parser.explains_moe_ckpt = True
    parser.error = _with_remedy(parser.error)
    for name in ("instantiate_classes", "instantiate"):
        if hasattr(parser, name):
            setattr(parser, name, _unwrapped(getattr(parser, name)))


def remedy(message: str) -> str | None:
    """Return the likely meaning of a message about an unknown name in this package, or a wrong type; `None` for any other."""
    for module, name, option, value in _WRONG.findall(message):
        hints = _hints(getattr(importlib.import_module(module), name))
        if option in hints:
            *others, last = dict.fromkeys(_in_words(hints[option]))
            return f"`{name}({option}={value})` must be {', '.join(others)}{' or ' * bool(others)}{last}."
    for module, name in dict.fromkeys(_CLASS.findall(message)):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if found is None:
            return _meant(f"`{module}.{name}`: there is no such class.", name, dir(importlib.import_module(module)))
        takes = list(inspect.signature(found).parameters)
        for unknown in filter(None, (key for keys in _UNKNOWN.findall(message) for key in keys)):
            if (option := unknown.rpartition(".")[2]) not in takes:
                return _meant(f"`{name}({option}=...)`: there is no such argument.", option, takes)
    return None


def _hints(kind: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of a class's arguments by name, with those shared by all checkpoint callbacks."""
    written = {name: parameter.annotation for name, parameter in inspect.signature(kind).parameters.items()}
    return written | {k: v for k, v in typing.get_type_hints(kind.__init__).items() if k in written}


def _in_words(hint: Any) -> list[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return list(map(str, parts))
    if origin in (typing.Union, UnionType):
        return [word for part in parts for word in _in_words(part)]
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Sequence | Mapping) and kind is not str:
        return ["a mapping" if issubclass(kind, Mapping) else "a list"]
    return [_IN_WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")]


def _meant(what: str, word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, [each for each in known if not each.startswith("_")], n=1)
    return f"{what} " + (f"Did you mean `{near[0]}`?" if near else f"It takes {', '.join(known)}.")


def _with_remedy(error: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(error)
    def explained(parser: object, message: str, *rest: Any, **more: Any) -> Any:
        sentence = remedy(str(message))
        return error(parser, message if sentence is None else f"{message}\n{_PACKAGE}: {sentence}", *rest, **more)

    return explained


def _unwrapped(instantiate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(instantiate)
    def tried(*given: Any, **more: Any) -> Any:
        try:
            return instantiate(*given, **more)
        except Exception as error:
            found = next((each for each in with_causes(error) if isinstance(each, CheckpointError)), None)
            if found is None or found is error:
                raise
            raise found from None

    return tried
