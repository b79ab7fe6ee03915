"""What markers say of files: a rank's own segments, and records of it that files of older generations hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from typing_extensions import override

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._json import Fields, digest_of, read_text
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._record_table import RecordEntry, RecordTable

_LIFE = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentEntry:
    """One segment file as its rank wrote it."""

    step: int
    """Boundary at which it was captured."""
    key: str
    nbytes: int
    digest: str
    """Of the whole file."""
    records: Sequence[RecordEntry] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BorrowedEntry:
    """Records of a rank's part of a generation that a file of an older generation of the same rank holds."""

    generation: GenerationId
    """Whose file it is; committed before the generation that borrows."""
    segment: SegmentEntry
    """The file as its own marker describes it, with only the records that are borrowed."""


class Lines:
    """The lines behind a marker's document, taken one after the other."""

    def __init__(self, data: bytes, start: int, where: str) -> None:
        self._data, self._next, self._where = data, start, where

    def take(self, value: object, where: str) -> bytes:
        """The next line, which `value` describes by length and digest. Raises `Corrupt` for other bytes."""
        body = Fields(value, where)
        nbytes, digest = body.integer("nbytes"), body.text("digest")
        body.end()
        line = self._data[self._next : self._next + nbytes]
        self._next += nbytes
        if len(line) != nbytes or digest_of(line) != digest:
            raise Corrupt(f"{where}: a line of it is not the one that was written. Another copy may be good.")
        return line

    def end(self) -> None:
        """Refuse bytes that nothing describes."""
        if self._next != len(self._data):
            raise Corrupt(f"{self._where}: {len(self._data) - self._next} bytes too many. Another copy may be good.")


def line_body(line: bytes) -> dict[str, object]:
    """How a document covers a line behind it."""
    return {"nbytes": len(line), "digest": digest_of(line)}


def segment_body(segment: SegmentEntry, table: RecordTable) -> dict[str, object]:
    """JSON form of a segment, whose records are in a line."""
    return {
        "step": segment.step,
        "key": segment.key,
        "nbytes": segment.nbytes,
        "digest": segment.digest,
        "records": line_body(table.line),
        "side_file": None,
    }


def read_segment(value: object, where: str, lines: Lines) -> SegmentEntry:
    """Read a segment; the next line holds its records. Raises `Corrupt`."""
    body = Fields(value, where)
    nbytes = body.integer("nbytes")
    segment = SegmentEntry(
        step=body.integer("step"),
        key=body.text("key"),
        nbytes=nbytes,
        digest=body.text("digest"),
        records=RecordTable(lines.take(body.plain("records"), where), where, file_nbytes=nbytes),
    )
    body.optional("side_file", _refuse_side_file)
    body.end()
    return segment


def borrowed_body(borrowed: BorrowedEntry, table: RecordTable) -> dict[str, object]:
    """JSON form of borrowed records, which are in a line."""
    return {"generation": generation_body(borrowed.generation), "segment": segment_body(borrowed.segment, table)}


def read_borrowed(value: object, where: str, lines: Lines) -> BorrowedEntry:
    """Read borrowed records; the next line holds them. Raises `Corrupt`."""
    body = Fields(value, where)
    borrowed = BorrowedEntry(
        generation=read_generation(body.plain("generation"), where),
        segment=read_segment(body.plain("segment"), where, lines),
    )
    body.end()
    return borrowed


def generation_body(generation: GenerationId) -> dict[str, object]:
    """JSON form of a generation."""
    body: dict[str, object] = {"step": generation.step, "epoch": generation.epoch}
    return body | {"life": generation.life} if generation.life else body


def read_generation(value: object, where: str) -> GenerationId:
    """Read a generation. Raises `Corrupt`."""
    body = Fields(value, where)
    life = read_life(body.text("life"), where) if body.has("life") else ""
    generation = GenerationId(step=body.integer("step"), epoch=body.integer("epoch"), life=life)
    body.end()
    return generation


def read_life(value: object, where: str) -> str:
    """Read what names a life. Raises `Corrupt`."""
    if not isinstance(value, str) or not _LIFE.fullmatch(value):
        raise Corrupt(f"{where}: the name of a life has 12 hexadecimal digits, found {value!r}.")
    return value


def _refuse_side_file(value: object, where: str) -> None:
    raise Corrupt(f"{where}: `side_file` is {value!r}, and must be null.")


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
    """What other programs need to know of a module in order to load its parameters and buffers.

    Records name parameters and buffers. Which of them a strict `load_state_dict` wants, and under which further names, and
    what a Hugging Face folder needs beside weights, is known only where the module lives: there it is written down.
    """

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
    """The last line of a marker of rank 0, parsed when somebody asks.

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
