"""Parts of a marker: a rank's own segments, records in older files that it refers to, and the description of the module."""

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

_NONCE = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentEntry:
    """One segment file as its rank wrote it."""

    step: int
    """Step boundary at which the file was captured."""
    key: str
    nbytes: int
    digest: str
    """Digest of the whole file."""
    records: Sequence[RecordEntry] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencedEntry:
    """Records that a generation refers to a file of an older generation of the same rank."""

    generation: GenerationId
    """The generation that the file belongs to; committed before the one that references."""
    segment: SegmentEntry
    """The file as its own marker describes it, reduced to the referenced records."""


class MarkerLines:
    """Reader of the lines after a marker's document, one after another."""

    def __init__(self, data: bytes, start: int, where: str) -> None:
        self._data, self._next, self._where = data, start, where

    def take(self, value: object, where: str) -> bytes:
        """Return the next line; `value` has its length and digest. Raises `Corrupt` for other bytes."""
        body = Fields(value, where)
        nbytes, digest = body.integer("nbytes"), body.text("digest")
        body.end()
        line = self._data[self._next : self._next + nbytes]
        self._next += nbytes
        if len(line) != nbytes or digest_of(line) != digest:
            raise Corrupt(f"{where}: a line of it is not the one that was written. Another copy may be good.")
        return line

    def end(self) -> None:
        """Raise `Corrupt` if bytes are left over."""
        if self._next != len(self._data):
            raise Corrupt(f"{self._where}: {len(self._data) - self._next} bytes too many. Another copy may be good.")


def line_body(line: bytes) -> dict[str, object]:
    """Return length and digest of a line, for the document before it."""
    return {"nbytes": len(line), "digest": digest_of(line)}


def segment_body(segment: SegmentEntry, table: RecordTable) -> dict[str, object]:
    """Encode a segment as JSON; its records are in a line of their own."""
    return {
        "step": segment.step,
        "key": segment.key,
        "nbytes": segment.nbytes,
        "digest": segment.digest,
        "records": line_body(table.line),
        "side_file": None,
    }


def read_segment(value: object, where: str, lines: MarkerLines) -> SegmentEntry:
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


def reference_body(referenced: ReferencedEntry, table: RecordTable) -> dict[str, object]:
    """Encode a referenced entry as JSON; its records are in a line of their own."""
    return {"generation": generation_body(referenced.generation), "segment": segment_body(referenced.segment, table)}


def read_reference(value: object, where: str, lines: MarkerLines) -> ReferencedEntry:
    """Read referenced records; the next line holds them. Raises `Corrupt`."""
    body = Fields(value, where)
    referenced = ReferencedEntry(
        generation=read_generation(body.plain("generation"), where),
        segment=read_segment(body.plain("segment"), where, lines),
    )
    body.end()
    return referenced


def generation_body(generation: GenerationId) -> dict[str, object]:
    """Encode a generation as JSON."""
    body: dict[str, object] = {"step": generation.step, "incarnation": generation.incarnation}
    return body | {"nonce": generation.nonce} if generation.nonce else body


def read_generation(value: object, where: str) -> GenerationId:
    """Read a generation. Raises `Corrupt`."""
    body = Fields(value, where)
    nonce = read_nonce(body.text("nonce"), where) if body.has("nonce") else ""
    generation = GenerationId(step=body.integer("step"), incarnation=body.integer("incarnation"), nonce=nonce)
    body.end()
    return generation


def read_nonce(value: object, where: str) -> str:
    """Read the name of an incarnation. Raises `Corrupt`."""
    if not isinstance(value, str) or not _NONCE.fullmatch(value):
        raise Corrupt(f"{where}: the name of an incarnation has 12 hexadecimal digits, found {value!r}.")
    return value


def _refuse_side_file(value: object, where: str) -> None:
    raise Corrupt(f"{where}: `side_file` is {value!r}, and must be null.")


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceEntry:
    """A Hugging Face model inside the module that was trained."""

    prefix: str
    """Name of the submodule: `model` if its parameters are called `model.*`; empty if it is the module itself."""
    class_name: str
    config: str
    """Content of its `config.json`."""
    generation_config: str | None
    """Content of its `generation_config.json`."""
    tied: tuple[str, ...]
    """Names of tied parameters within it, which Hugging Face files leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleEntry:
    """Description of a module, with which other programs can load its parameters and buffers.

    Records name parameters and buffers. Only the training process knows which of them a strict `load_state_dict` wants,
    under which further names, and what else a Hugging Face folder needs. So that process writes this entry.
    """

    class_name: str
    unsaved: tuple[str, ...]
    """Stored names that the `state_dict` leaves out, such as non-persistent buffers."""
    aliases: Mapping[str, str]
    """Further names in the `state_dict` (tied weights), each with the name under which it is stored."""
    foreign: tuple[str, ...]
    """Names in the `state_dict` that are neither parameters nor buffers and are not stored."""
    optimizer: str
    """Class of the optimizer."""
    param_groups: tuple[tuple[str, ...], ...]
    """Parameters of each group of the optimizer, in its order."""
    hugging_face: tuple[HuggingFaceEntry, ...]
    """Outermost Hugging Face models in the module."""
    extra: str
    """What the trainer adds to its own checkpoints: a value of the journal's codec, in base64."""


class ModuleLine:
    """The last line of rank 0's marker, parsed on demand.

    Args:
        line: the stored bytes, with the newline.
        where: key of the marker, for messages.
    """

    def __init__(self, line: bytes, where: str = "module") -> None:
        self.line = line
        self._where = where

    @classmethod
    def of(cls, entry: ModuleEntry) -> ModuleLine:
        """Encode a description as a line."""
        return cls(json.dumps(asdict(entry), sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n")

    def read(self) -> ModuleEntry:
        """Parse the line. Raises `Corrupt` if it does not describe a module."""
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
