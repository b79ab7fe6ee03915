"""Objects in S3, Google Cloud Storage, Azure and compatible stores, through obstore (Rust object_store).

An upload goes from the segment in memory to the socket in parts, without a copy and without the GIL. An exception
aborts the upload, so a partial object is never published. Every request has a time-out, and the whole transfer has a
deadline that is checked before each part. Payloads are not hashed for the signature: the markers hold our digests, and
TLS protects the connection.

A process killed during an upload to S3 leaves parts in the bucket, invisible to listings but paid for. obstore cannot list
uploads, botocore can. If botocore is not installed, or the store refuses such requests, the bucket needs a lifecycle
rule; a warning says so once.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyExists, KeyMissing, StorageError, StorageRefused
from lightning_moe_ckpt.storage._backend import (
    MIN_NBYTES_PER_SECOND,
    Entry,
    Pace,
    chunks_of,
    expect_readable,
    probe_create,
)
from lightning_moe_ckpt.storage._object_options import Unmapped, split_url, translate

PART_NBYTES = 16 * 2**20
_MIN_PART_NBYTES = 5 * 2**20  # the limit of S3, except for the last part
_DELETED_AT_ONCE = 1000

_STORES: Mapping[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

_runtime_pid: int | None = None
"""Process whose threads serve obstore. A fork does not inherit the threads, so a call there would never return."""

T = TypeVar("T")

log = rank_logger(__name__)

_REFUSALS = {400, 401, 403, 405, 501}

_ROUNDS = 3
"""How often uploads are listed and aborted: parts sent during an abort keep the upload in the listing."""


class ObjectBackend:
    """Prefix of a bucket. Thread safe. Open it after a fork, and only if the parent has opened none."""

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        min_nbytes_per_second: int = MIN_NBYTES_PER_SECOND,
        bandwidth: int | None = None,
    ) -> None:
        """Open the store of `url` (`s3://bucket/path`, `gs://`, `az://container/path`); nothing is read or written.
        Options are those of s3fs, gcsfs or adlfs, or of obstore.

        `timeout` limits one call, without the time for its bytes, which follows from the slowest expected transfer.
        `bandwidth` is in bytes per second that `put` may write; `None` for no limit.

        Raises `ConfigurationError` if there is no bucket, or this process's parent already uses object stores;
        `Unmapped` if obstore has no equivalent of an option.
        """
        try:
            kind, bucket, prefix = split_url(url)
        except ValueError as error:
            raise ConfigurationError(f"`{url}` names {error}.") from error
        options = translate(kind, storage_options or {})
        self.url, self._timeout, self._min_rate = url.rstrip("/"), timeout, min_nbytes_per_second
        self._pace = Pace(bandwidth)
        part_nbytes = max(options.transfer.get("part_nbytes", PART_NBYTES), _MIN_PART_NBYTES)
        self._part_nbytes = self._pace.chunk_nbytes(part_nbytes, least=_MIN_PART_NBYTES)
        self._concurrency = options.transfer.get("max_concurrency", 4)
        part_limit = timeout + timedelta(seconds=self._part_nbytes / min_nbytes_per_second)
        client = {"connect_timeout": timedelta(seconds=min(10.0, timeout.total_seconds())), "timeout": part_limit}
        # obstore retries requests only for a short while; `Retrying` repeats whole calls with longer pauses.
        backoff = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2)}
        retry = {"max_retries": 2, "retry_timeout": timeout, "backoff": backoff}
        self.unfinished: UnfinishedUploads | None = None
        """Access to incomplete uploads of the bucket; `None` unless the store is S3."""
        _claim_runtime(url)
        try:
            self._store = _STORES[kind](
                bucket,
                prefix=prefix or None,
                config=options.config or None,
                client_options=client | options.client,
                retry_config=retry,
            )
        except UnknownConfigurationKeyError as error:
            raise Unmapped(f"an option ({_first_line(error)})") from error
        except (BaseError, ValueError, TypeError) as error:
            raise ConfigurationError(f"`{url}` cannot be opened: {_first_line(error)}") from error
        if kind == "s3":
            # obstore does not expose these two, and botocore reads other variables.
            found: dict[str, Any] = {"endpoint": os.environ.get("AWS_ENDPOINT"), "region": os.environ.get("AWS_REGION")}
            found |= {**options.config, **self._store.config}
            seconds = timeout.total_seconds()
            self.unfinished = UnfinishedUploads(bucket, found, options.client, options.certificates, seconds)

    @cached_property
    def creates_exclusively(self) -> bool:
        """Whether the store honours `If-None-Match: *`; probed once."""
        return probe_create(self.url, self._create, self.get, self.delete)

    def put(self, key: str, *views: bytes | memoryview) -> None:
        nbytes = sum(memoryview(view).nbytes for view in views)
        what = f"put {key} at {self.url}"
        pieces = self._pieces(views, what, time.monotonic() + self._limit(nbytes) + self._pace.seconds(nbytes))
        big = nbytes > self._part_nbytes
        body = pieces if big else list(pieces)
        put = partial(obstore.put, use_multipart=big, chunk_size=self._part_nbytes, max_concurrency=self._concurrency)
        self._call(what, lambda: put(self._store, key, body))

    def create(self, key: str, data: bytes) -> None:
        """Upload if the key is free. A store that cannot refuse is looked at first, and a race can defeat that."""
        if not self.creates_exclusively and self._holds(key):
            raise KeyExists(f"create {key}: exists at {self.url}.")
        self._create(key, data)

    def get(self, key: str) -> bytes:
        what = f"get {key} at {self.url}"
        found = self._call(what, lambda: obstore.get(self._store, key))
        expect_readable(key, int(found.meta["size"]), f"{self.url}/{key}", self.get_range)
        return self._call(what, lambda: bytes(memoryview(found.bytes())))

    def get_into(self, key: str, out: memoryview) -> None:
        nbytes = int(self._call(f"get {key} at {self.url}", lambda: obstore.head(self._store, key))["size"])
        if nbytes != out.nbytes:
            raise Corrupt(f"{self.url}/{key}: has {nbytes} bytes, {out.nbytes} were written. Another copy may be good.")
        if nbytes > self._part_nbytes:
            self.get_range(key, 0, out)
        else:
            self._fill(key, 0, out, self.get(key))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        what = f"get {key} at {self.url}"
        rest, deadline = out.cast("B") if out.nbytes else out, time.monotonic() + self._limit(out.nbytes)
        for begin in range(0, out.nbytes, self._part_nbytes * self._concurrency):
            stop = min(begin + self._part_nbytes * self._concurrency, out.nbytes)
            starts = list(range(begin, stop, self._part_nbytes))
            ends = [min(at + self._part_nbytes, stop) for at in starts]
            self._in_time(what, deadline, begin)
            places = {"starts": [start + at for at in starts], "ends": [start + at for at in ends]}
            parts = self._call(what, partial(self._ranges, key, places))
            for at, end, part in zip(starts, ends, parts, strict=True):
                self._fill(key, start + at, rest[at:end], part)

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        """List objects whose key starts with `prefix`; obstore itself lists whole folders only.

        Asks again behind the last key until nothing more comes: obstore takes any XML for the last page, also an error's.
        """
        folder, found, idle, is_end = prefix.rpartition("/")[0], dict[str, int](), 0, False
        last = max(after, prefix[:-1])  # comes before every key that is wanted
        while not is_end and idle < (1 if found else 2):
            behind = partial(self._behind, folder, last, prefix, most)
            listed, is_end = self._call(f"list {folder} at {self.url}", behind)
            idle += listed.keys() <= found.keys()  # not by emptiness: a server may ignore the start key
            found |= listed
            last = max([last, *listed])
        wanted = [key for key in sorted(found) if key.startswith(prefix) and key > after]
        return [Entry(key, found[key]) for key in wanted[:most]]

    def delete(self, *keys: str) -> None:
        """Delete a thousand objects with each request, or single objects where the store takes no lists."""
        for begin in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[begin : begin + _DELETED_AT_ONCE]
            given = some[0] if len(some) == 1 else list(some)
            try:
                self._call(f"delete {some[0]} at {self.url}", partial(obstore.delete, self._store, given))
            except StorageError as error:
                if len(some) == 1 and not isinstance(error, KeyMissing):
                    raise
                for key in some if len(some) > 1 else ():
                    self.delete(key)

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        """List incomplete uploads; only S3 shows them."""
        self._check_process()
        if self.unfinished is None:
            return []
        uploads = self.unfinished.list(self.full_key(prefix))
        return [Entry(upload.key[len(self.full_key("")) :].lstrip("/"), 0) for upload in uploads]

    def sweep(self, prefix: str) -> None:
        """Abort incomplete uploads on S3. Other stores need a lifecycle rule of the bucket."""
        self._check_process()
        if self.unfinished is not None:
            self.unfinished.abort(self.full_key(prefix))

    def full_key(self, key: str) -> str:
        """Return the key, or prefix of keys, within the bucket."""
        return "/".join(filter(None, (self._store.prefix, key)))

    def modified(self, key: str) -> float:
        """Return an object's time of writing, in seconds since 1970 by the store's clock."""
        facts = self._call(f"head {key} at {self.url}", lambda: obstore.head(self._store, key))
        return float(facts["last_modified"].timestamp())

    def close(self) -> None:
        """Abandon running uploads at their next part; connections close with the store's last reference."""
        self._pace.close()

    def _behind(self, folder: str, last: str, prefix: str, most: int | None) -> tuple[Mapping[str, int], bool]:
        """Return key and size of objects in a folder behind a key, and whether no more are wanted."""
        found = dict[str, int]()
        for page in obstore.list(self._store, folder or None, offset=last or None, chunk_size=1000):
            sizes = {str(facts["path"]): int(facts["size"]) for facts in page}
            found |= sizes
            wanted = sum(key > last and key.startswith(prefix) for key in found) if most is not None else -1
            if wanted >= (most or 0) or max([prefix, *sizes]) > f"{prefix}\U0010ffff":
                return found, True
        return found, False

    def _ranges(self, key: str, places: Mapping[str, Sequence[int]]) -> Sequence[Any]:
        try:
            return obstore.get_ranges(self._store, key, starts=places["starts"], ends=places["ends"], coalesce=0)
        except BaseError as error:
            if "non-partial response" not in str(error):
                raise
        # Some servers ignore a range that covers the whole object.
        whole = memoryview(obstore.get(self._store, key).bytes())
        return [whole[start:end] for start, end in zip(places["starts"], places["ends"], strict=True)]

    def _fill(self, key: str, start: int, out: memoryview, part: Any) -> None:
        view = memoryview(part)
        if view.nbytes != out.nbytes:
            raise Corrupt(f"{self.url}/{key}: ended before byte {start + out.nbytes}. Another copy may be good.")
        if view.nbytes:
            out.cast("B")[:] = view

    def _holds(self, key: str) -> bool:
        return any(entry.key == key for entry in self.list(key))

    def _create(self, key: str, data: bytes) -> None:
        what = f"create {key} at {self.url}"
        self._call(what, lambda: obstore.put(self._store, key, data, mode="create", use_multipart=False))

    def _limit(self, nbytes: int) -> float:
        return self._timeout.total_seconds() + nbytes / self._min_rate

    def _pieces(self, views: Sequence[bytes | memoryview], what: str, deadline: float) -> Iterator[memoryview]:
        """Yield slices of the views without copying; an exception here aborts the upload."""
        done = 0
        for piece in chunks_of(views, self._part_nbytes):
            self._pace.wait(piece.nbytes)
            self._in_time(what, deadline, done)
            done += piece.nbytes
            yield piece

    def _in_time(self, what: str, deadline: float, done: int) -> None:
        if time.monotonic() > deadline:
            raise StorageError(f"{what}: out of time after {done} bytes. Check the store and the network.")

    def _check_process(self) -> None:
        if os.getpid() != _runtime_pid:
            raise _forked(self.url)

    def _call(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` and turn its exceptions into `StorageError`s."""
        self._check_process()
        try:
            return call()
        except (AlreadyExistsError, PreconditionError) as error:
            raise KeyExists(f"{what}: exists.") from error
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StorageRefused(f"{what}: there is no such bucket. Create it, or name another.") from error
            if "NoSuchUpload" in str(error):
                raise StorageError(f"{what}: the upload was aborted, perhaps by a later start of this job.") from error
            raise KeyMissing(f"{what}: not there.") from error
        except StorageError:
            raise
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StorageRefused(f"{what}: {_first_line(error)} Check the keys and what they allow.") from error
        except (BaseError, OSError) as error:
            raise StorageError(f"{what}: {_first_line(error)}{_KEYLESS * (_METADATA in str(error))}") from error


_METADATA = "/latest/api/token"
"""Address where AWS machines get keys, asked if there are none elsewhere."""
_KEYLESS = (
    " (No keys were given, so the machine was asked for its own. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what your "
    "store takes, or pass storage_options.)"
)


def _claim_runtime(url: str) -> None:
    global _runtime_pid  # noqa: PLW0603 - it mirrors a global of the library
    if _runtime_pid is None:
        _runtime_pid = os.getpid()
    elif _runtime_pid != os.getpid():
        raise _forked(url)


def _forked(url: str) -> ConfigurationError:
    return ConfigurationError(
        f"`{url}`: this process was forked from one (pid {_runtime_pid}) that already uses object stores, and the threads "
        "that serve them were not. Start it with `spawn`, or open the run in the forked processes only."
    )


def _first_line(error: Exception) -> str:
    """Return the message of an obstore error without the debug dump after it."""
    return str(error).split("\n\nDebug source", 1)[0].strip().replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Upload:
    """Multipart upload that is neither completed nor aborted."""

    key: str
    """Key within the bucket."""
    upload_id: str


@dataclass(repr=False, eq=False)
class UnfinishedUploads:
    """The incomplete uploads of one bucket; botocore finds missing values of `config` where obstore does."""

    page_size = 1000

    bucket: str
    config: Mapping[str, Any]
    http: Mapping[str, Any]
    """obstore's options for the HTTP client."""
    certificates: str | None
    timeout: float
    """Seconds for one request."""
    why_useless: str | None = None
    """Reason why the store cannot be asked; `None` as long as none is known."""

    def abort(self, prefix: str) -> int:
        """Abort every upload to a key that starts with `prefix`; return how many, zero if the store cannot be asked.
        Raises `StorageError` if a request failed.
        """
        num_aborted = 0
        for _ in range(_ROUNDS):
            found = self.list(prefix)
            for upload in found:
                log.info("aborting an upload to %s, left by an interrupted write", upload.key)
                with self._asking("abort_multipart_upload"):
                    self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload.key, UploadId=upload.upload_id)
            num_aborted += len(found)
            if not found:
                break
        return num_aborted

    def list(self, prefix: str) -> list[Upload]:
        """List incomplete uploads to keys that start with `prefix`, of any process. Raises `StorageError` if a request failed."""
        found = list[Upload]()
        if self.why_useless is not None:
            return found
        try:
            with self._asking("list_multipart_uploads"):
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self.bucket, Prefix=prefix, PaginationConfig={"PageSize": self.page_size}
                )
                found += [Upload(each["Key"], each["UploadId"]) for page in pages for each in page.get("Uploads", [])]
        except ImportError:
            self._give_up("botocore is not installed (`python -m pip install botocore`)")
        except _RefusedError as refused:
            self._give_up(f"{refused}")
        return [each for each in found if each.key.startswith(prefix)]  # some servers ignore the parameter

    # For tests of the store itself.

    def begin(self, key: str) -> Upload:
        with self._asking("create_multipart_upload"):
            return Upload(key, self._client.create_multipart_upload(Bucket=self.bucket, Key=key)["UploadId"])

    def refuses_small_parts(self, key: str) -> bool:
        place = {"Bucket": self.bucket, "Key": key, "UploadId": self.begin(key).upload_id}
        parts = [
            {"PartNumber": number, "ETag": self._client.upload_part(**place, PartNumber=number, Body=b"a part")["ETag"]}
            for number in (1, 2)
        ]
        return self._refuses("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})

    def refuses_wrong_digest(self, key: str) -> bool:
        digest = base64.b64encode(bytes(16)).decode()
        return self._refuses("put_object", Bucket=self.bucket, Key=key, Body=b"a body", ContentMD5=digest)

    # -- private

    def _refuses(self, operation: str, **arguments: Any) -> bool:
        try:
            with self._asking(operation):
                getattr(self._client, operation)(**arguments)
        except _RefusedError:
            return True
        return False

    def _give_up(self, reason: str) -> None:
        self.why_useless = reason
        log.info(
            "%s cannot be asked for unfinished uploads: %s. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) "
            "removes what killed processes leave",
            self.bucket,
            reason,
        )

    @contextlib.contextmanager
    def _asking(self, operation: str) -> Iterator[None]:
        """Turn exceptions of botocore into `StorageError`s; a missing upload is no error."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except NoCredentialsError as error:
            raise _RefusedError("no credentials were found") from error
        except ClientError as error:
            if (status := error.response["ResponseMetadata"]["HTTPStatusCode"]) in _REFUSALS:
                raise _RefusedError(f"it answers {status} {error.response['Error'].get('Code', '')}") from error
            if status != 404:  # another process was faster, or there never was such an upload
                raise StorageError(f"{operation} in {self.bucket}: {error}.") from error
        except BotoCoreError as error:
            raise StorageError(f"{operation} in {self.bucket}: {error} Check the store and the network.") from error

    @cached_property
    def _client(self) -> Any:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        config = self.config
        virtual = str(config.get("virtual_hosted_style_request", "")).lower() == "true"
        endpoint = config.get("endpoint")
        if virtual and endpoint:  # for obstore the endpoint already contains the bucket
            endpoint = endpoint.replace(f"//{self.bucket}.", "//", 1)
        trusted = not self.http.get("allow_invalid_certificates")
        return botocore.session.get_session().create_client(
            "s3",
            region_name=config.get("region"),
            endpoint_url=endpoint,
            aws_access_key_id=config.get("access_key_id"),
            aws_secret_access_key=config.get("secret_access_key"),
            aws_session_token=config.get("session_token"),
            verify=trusted and self.certificates,
            config=Config(
                signature_version=UNSIGNED if config.get("skip_signature") else None,
                connect_timeout=self.timeout,
                read_timeout=self.timeout,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "virtual" if virtual or not endpoint else "path"},
                request_checksum_calculation="when_required",
            ),
        )


class _RefusedError(StorageError):
    """The store does not support this request, or this user may not make it."""
