"""The choice of a medium by its URL. What talks to a store is imported when one is opened: that takes half a second."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from datetime import timedelta

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.storage._backend import MIN_NBYTES_PER_SECOND, PATIENCE, Backend, StorageOptions
from lightning_moe_ckpt.storage._object_options import SCHEMES, Unmapped
from lightning_moe_ckpt.storage._posix import PosixBackend
from lightning_moe_ckpt.storage._retry import Retrying
from lightning_moe_ckpt.storage._url import checked_url, scheme_of

log = logging.getLogger(__name__)

_wrappers: list[Callable[[Backend], Backend]] = []


def open_backend(
    url: str,
    *,
    storage_options: StorageOptions | None = None,
    bandwidth: int | None = None,
    patience: timedelta = PATIENCE,
) -> Backend:
    """Choose a backend by the scheme of `url` and put retries around it; nothing is written yet.

    Args:
        url: a path, `file://`, `s3://`, `gs://`, `az://`, or any other URL fsspec knows. Open after a fork, not before.
        storage_options: in the words of s3fs, gcsfs, adlfs or whatever fsspec file system serves the URL; not
            accepted for paths.
        bandwidth: bytes per second that `put` may write, all threads of this process together; `None` for no cap.
        patience: how long a failing operation is tried again, beside the time for its bytes.

    Raises:
        ConfigurationError: it names no place, its scheme is unknown, its package is missing, or the options do not fit.
    """
    backend = open_without_retries(url, storage_options=storage_options, bandwidth=bandwidth)
    for wrap in _wrappers:
        backend = wrap(backend)
    rate = min(MIN_NBYTES_PER_SECOND, bandwidth or MIN_NBYTES_PER_SECOND)
    return Retrying(backend, patience=patience, min_nbytes_per_second=rate)


@contextlib.contextmanager
def wrapping_backends(wrap: Callable[[Backend], Backend]) -> Iterator[None]:
    """Put `wrap` around every backend that `open_backend` opens meanwhile, below its retries: for tests of failures."""
    _wrappers.append(wrap)
    try:
        yield
    finally:
        _wrappers.remove(wrap)


def open_without_retries(
    url: str, *, storage_options: StorageOptions | None = None, bandwidth: int | None = None
) -> Backend:
    """As `open_backend`, without the retries."""
    url = checked_url(url)
    factory = _FACTORIES.get(scheme_of(url), _open_fsspec)
    return factory(url, storage_options or {}, bandwidth)


def _open_posix(url: str, storage_options: StorageOptions, bandwidth: int | None) -> Backend:
    if storage_options:
        raise ConfigurationError(f"`{url}` is a path and takes no storage_options, got {sorted(storage_options)}.")
    return PosixBackend(re.sub(r"^\w+://", "", url), bandwidth=bandwidth)


def _open_fsspec(url: str, storage_options: StorageOptions, bandwidth: int | None) -> Backend:
    from lightning_moe_ckpt.storage._fsspec import FsspecBackend

    return FsspecBackend(url, storage_options=storage_options, bandwidth=bandwidth)


def _open_object(url: str, storage_options: StorageOptions, bandwidth: int | None) -> Backend:
    from lightning_moe_ckpt.storage._object import ObjectBackend

    try:
        return ObjectBackend(url, storage_options=storage_options, bandwidth=bandwidth)
    except Unmapped as unmapped:
        log.warning("%s: obstore has no word for %s; the fsspec file system is used, which is slower", url, unmapped)
        return _open_fsspec(url, storage_options, bandwidth)


# Schemes that do not go through fsspec.
_FACTORIES: dict[str, Callable[[str, StorageOptions, int | None], Backend]] = {
    **dict.fromkeys(("file", "local"), _open_posix),
    **dict.fromkeys(SCHEMES, _open_object),
}
