"""What may be given as the place of checkpoints, and what is a slip of the pen."""

from __future__ import annotations

import hashlib
import os
import re

from fsspec.registry import known_implementations

from lightning_moe_ckpt.errors import ConfigurationError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HALF_A_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/?(?!/)")


def scheme_of(url: str) -> str:
    """The scheme in lower case; `file` for a path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else "file"


def place_of(url: str) -> str:
    """The URL by which all processes know a place: a path without links on the way."""
    return f"file://{os.path.realpath(url[len('file://') :])}" if url.startswith("file://") else url


def memory_tag(key: str, url: str) -> str:
    """What names of a run's shared memory have in common: 32 hexadecimal digits.

    Nobody can guess it who cannot read the log. A copy of the run's directory has another one: it is another place, and
    what is in memory belongs to the job that goes on at the first.

    Args:
        key: secret of the run, from its log.
        url: of the run.
    """
    return hashlib.blake2b(place_of(url).encode(), key=bytes.fromhex(key), digest_size=16).hexdigest()


def checked_url(url: object) -> str:
    """The URL as text.

    Args:
        url: a path, as text or as an object; or a URL.

    Raises:
        ConfigurationError: it names no place, or not the one that was meant.
    """
    if not isinstance(url, str | os.PathLike):
        raise ConfigurationError(f"`url={url!r}` is a {type(url).__name__}. Give a path or a URL as text.")
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(
            f"`url={url!r}` names no place. Give a folder for the checkpoints of this run, or a URL."
        )
    if "::" in text:
        raise ConfigurationError(f"`{text}` chains file systems, whose caches hide failures. Name one store.")
    half = _HALF_A_SCHEME.match(text)
    if half and half[1].lower() in known_implementations:
        rest = text.partition(":")[2].lstrip("/")
        slashes = ":///" if half[1].lower() in {"file", "local"} else "://"
        raise ConfigurationError(f"`{text}` is neither a path nor a URL. Did you mean `{half[1]}{slashes}{rest}`?")
    if _SCHEME.match(text) and re.search(r"[?#]", text):
        raise ConfigurationError(
            f"`{text}` has a query, which no store reads here. Give options as storage_options; a file name with such a "
            "character is given as a path without scheme."
        )
    return text
