"""What a marker says of the module that was trained, for programs that do not have it.

Records name parameters and buffers. Which of them a strict `load_state_dict` wants, and under which further names, and
what a Hugging Face folder needs beside weights, is known only where the module lives: it is written down there, once, as
a line that every marker of rank 0 ends with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from typing_extensions import override

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._json import Fields, read_text


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceEntry:
    """A Hugging Face model inside the module that was trained."""

    prefix: str
    """Its place in the module: `model` if its parameters are called `model.*`; empty if it is the module."""
    class_name: str
    config: str
    """Content of its `config.json`."""
    generation_config: str | None
    """Content of its `generation_config.json`."""
    tied: tuple[str, ...]
    """Names within it that its class takes from other parameters of it, so that files leave them out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleEntry:
    """What other programs need to know of a module in order to load its parameters and buffers."""

    class_name: str
    unsaved: tuple[str, ...]
    """Stored names that its `state_dict` leaves out, such as buffers that are not persistent."""
    aliases: Mapping[str, str]
    """Further names in its `state_dict` (tied weights), each with the name under which it is stored."""
    foreign: tuple[str, ...]
    """Names in its `state_dict` of what is neither a parameter nor a buffer, and not stored."""
    optimizer: str
    """Class of the optimizer."""
    param_groups: tuple[tuple[str, ...], ...]
    """Parameters of each group of the optimizer, in its order."""
    hugging_face: tuple[HuggingFaceEntry, ...]
    """Outermost Hugging Face models in it."""
    extra: str
    """A value of the journal's codec, in base64: what the trainer adds to its own checkpoints."""


class ModuleLine:
    """The last line of a marker, parsed when somebody asks.

    Args:
        line: as it is stored, with its newline.
        where: key of the marker, for messages.
    """

    def __init__(self, line: bytes, where: str = "module") -> None:
        self.line = line
        self._where = where

    @classmethod
    def of(cls, entry: ModuleEntry) -> ModuleLine:
        """The line that says this."""
        return cls(json.dumps(asdict(entry), sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")

    def read(self) -> ModuleEntry:
        """What it says. Raises `Corrupt` if it is no such description."""
        try:
            value = json.loads(self.line)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"{self._where}: the line about the module is not JSON ({error}).") from error
        return _read_module(value, self._where)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleLine) and self.line == other.line

    @override
    def __hash__(self) -> int:
        return hash(self.line)


def _read_module(value: object, where: str) -> ModuleEntry:
    body = Fields(value, where)
    module = ModuleEntry(
        class_name=body.text("class_name"),
        unsaved=body.rows("unsaved", read_text),
        aliases={key: read_text(name, where) for key, name in body.plain("aliases").items()},
        foreign=body.rows("foreign", read_text),
        optimizer=body.text("optimizer"),
        param_groups=body.rows("param_groups", _read_names),
        hugging_face=body.rows("hugging_face", _read_hugging_face),
        extra=body.text("extra"),
    )
    body.end()
    return module


def _read_names(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise Corrupt(f"{where}: a list of names was expected, found {type(value).__name__}.")
    return tuple(read_text(each, where) for each in value)


def _read_hugging_face(value: object, where: str) -> HuggingFaceEntry:
    body = Fields(value, where)
    model = HuggingFaceEntry(
        prefix=body.text("prefix"),
        class_name=body.text("class_name"),
        config=body.text("config"),
        generation_config=body.optional("generation_config", read_text),
        tied=body.rows("tied", read_text),
    )
    body.end()
    return model
