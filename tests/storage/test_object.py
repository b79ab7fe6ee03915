"""Object stores keep the contract over the wire, within their time limits, and publish nothing half written."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import get_args

import obstore
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from servers._proxy import FaultyProxy, ProxyFault
from servers._s3 import KEY, SECRET, S3Server, running
from typing_extensions import override

from lightning_moe_ckpt.errors import ConfigurationError, KeyExists, KeyMissing, StorageError
from lightning_moe_ckpt.storage import Backend, ObjectBackend, open_backend
from lightning_moe_ckpt.storage._object_options import Unmapped, split_url, translate
from lightning_moe_ckpt.storage._open import open_without_retries
from lightning_moe_ckpt.testing import BackendContract

QUICK = timedelta(seconds=1)


@pytest.fixture(scope="module")
def ministack(s3: Callable[[str], S3Server]) -> S3Server:
    return s3("ministack")


@pytest.fixture(scope="module")
def rclone(s3: Callable[[str], S3Server]) -> S3Server:
    return s3("rclone")


def opened(server: S3Server, timeout: timedelta = timedelta(seconds=30), *, url: str | None = None) -> ObjectBackend:
    return ObjectBackend(url or server.url(), storage_options=server.storage_options, timeout=timeout)


class Listings(FaultyProxy):
    """Hands pages of one entry out, and fails in every listing behind its first pages."""

    pages: int | None = None
    """Number of pages that a listing gets; `None` for all."""
    failures: Iterator[ProxyFault | None] = itertools.cycle(get_args(ProxyFault))
    """How, in turns; `None` for a message in the place of the page, under the status of a page."""

    @override
    def fate(self, request: BaseHTTPRequestHandler) -> ProxyFault | None:
        fault = super().fate(request)
        if "list-type=2" not in request.path:
            return fault
        if "continuation-token" not in request.path:
            self.page = 0
        self.page += 1
        place, _, query = request.path.partition("?")
        request.path = f"{place}?{'&'.join(sorted([*query.split('&'), 'max-keys=1']))}"
        signed = AWSRequest("GET", f"http://{request.headers['host']}{request.path}")
        S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(signed)
        for name, value in signed.headers.items():
            del request.headers[name]
            request.headers[name] = value
        if self.pages is None or self.page <= self.pages:
            return fault
        fault = next(self.failures)
        if fault is None:
            request.wfile.write(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<Error><Code>InternalError</Code></Error>"
            )
            raise ConnectionAbortedError
        return fault


@pytest.fixture(scope="module")
def listings() -> Iterator[Callable[[S3Server], Listings]]:
    """Give the proxy in front of a server."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda server: stack.enter_context(Listings(server.port)))


class OverTheWire(BackendContract):
    """What the contract needs of a server."""

    server: S3Server
    proxy: Listings
    made: ObjectBackend

    def use(self, server: S3Server, listings: Callable[[S3Server], Listings]) -> None:
        self.server, self.proxy = server, listings(server)

    def make_backend(self, tmp_path: Path) -> Backend:
        self.made = opened(self.server)
        return self.made

    def break_listings(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        options = self.server.storage_options | {"endpoint_url": self.proxy.endpoint}
        monkeypatch.setattr(self.made, "_store", ObjectBackend(self.made.url, storage_options=options)._store)
        before, found = self.proxy.num_requests, self.made.list("")
        assert self.proxy.num_requests - before == len(found) + 1, "a page for each, and a last look behind them"
        monkeypatch.setattr(self.proxy, "pages", after)


class TestMoto(OverTheWire):
    """A store that honours conditions and the smallest part size."""

    @pytest.fixture(autouse=True)
    def serve(self, moto: S3Server, listings: Callable[[S3Server], Listings]) -> None:
        self.use(moto, listings)

    @override
    def test_of_many_creators_one_wins(self, backend: Backend) -> None:
        """One after another only: this server looks and stores in two steps, and two threads of it may both find nothing."""
        won = [_creates(backend, number) for number in range(3)]
        assert won == [True, False, False]
        assert backend.get("_log/0") == b"0"


def _creates(backend: Backend, number: int) -> bool:
    try:
        backend.create("_log/0", b"%d" % number)
    except KeyExists:
        return False
    return True


class TestMinistack(OverTheWire):
    """A store that rejects bad checksums."""

    @pytest.fixture(autouse=True)
    def serve(self, ministack: S3Server, listings: Callable[[S3Server], Listings]) -> None:
        self.use(ministack, listings)

    def make_paced_backend(self, tmp_path: Path, bandwidth: int) -> Backend:
        return ObjectBackend(
            self.server.url(), storage_options=self.server.storage_options, timeout=QUICK, bandwidth=bandwidth
        )


class TestRclone(OverTheWire):
    """A store that checks signatures and ignores conditions."""

    @pytest.fixture(autouse=True)
    def serve(self, rclone: S3Server, listings: Callable[[S3Server], Listings]) -> None:
        self.use(rclone, listings)

    @override
    def test_threads_do_not_disturb_each_other(self, backend: Backend) -> None:
        """In a folder that never gets empty: this server removes empty ones, perhaps with what is put there meanwhile."""
        backend.put("dir/stays", b"")
        super().test_threads_do_not_disturb_each_other(backend)


@pytest.mark.parametrize("failures", [get_args(ProxyFault), [None]], ids=["failure", "message"])
def test_a_page_that_fails_is_asked_for_again(
    failures: Sequence[ProxyFault | None],
    moto: S3Server,
    listings: Callable[[S3Server], Listings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also more often than the client does by itself, and where it sees nothing wrong: until the listing is whole."""
    proxy, keys = listings(moto), ["_log/0", "snap/1/a", "snap/2/b"]
    backend = open_backend(moto.url(), storage_options=moto.storage_options | {"endpoint_url": proxy.endpoint})
    for key in keys:
        backend.put(key, b"x")
    monkeypatch.setattr(proxy, "failures", itertools.cycle(failures))
    monkeypatch.setattr(proxy, "pages", 1)
    healed = threading.Timer(1, setattr, (proxy, "pages", None))
    healed.start()
    assert [entry.key for entry in backend.list("")] == keys
    healed.join()


def test_whether_conditions_hold_is_found_out(
    moto: S3Server, ministack: S3Server, rclone: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that overwrites is used, and said to be unfenced."""
    with caplog.at_level(logging.WARNING):
        assert opened(moto).creates_exclusively
        assert opened(ministack).creates_exclusively
        assert not caplog.records
        assert not opened(rclone).creates_exclusively
    assert "unfenced" in caplog.text


def test_urls_of_object_stores_go_to_obstore(ministack: S3Server) -> None:
    """Through the door that everything else uses, for writing and for reading parts."""
    url = ministack.url()
    backend = open_backend(url, storage_options=ministack.storage_options)
    backend.put("a", bytes(range(256)) * 100_000)
    ranged = open_backend(url, storage_options=ministack.storage_options)
    out = bytearray(1000)
    ranged.get_range("a", 255, memoryview(out))
    assert out == (bytes(range(256)) * 5)[255:1255]
    assert isinstance(open_without_retries(url, storage_options=ministack.storage_options), ObjectBackend)


def test_an_upload_copies_nothing(ministack: S3Server) -> None:
    """Peak memory does not grow by the size of a segment."""
    backend, segment = opened(ministack), memoryview(bytearray(160 * 2**20))
    backend.put("warm", segment[: 20 * 2**20])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backend.put("a", segment)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 32 * 2**20


def test_an_exception_during_an_upload_publishes_nothing(moto: S3Server) -> None:
    """The upload is aborted, its parts are gone from the server."""
    backend, unfinished = opened(moto), moto.unfinished_uploads()
    pieces = backend._pieces

    def failing(*args: object) -> Iterator[memoryview]:
        yield from list(pieces(*args))[:2]  # type: ignore[arg-type]
        raise RuntimeError("the segment was taken away")

    backend._pieces = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="taken away"):
        backend.put("a", bytes(50 * 2**20))
    assert backend.list("") == []
    assert moto.unfinished_uploads() == unfinished


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    """Whether it stops before a request or in the middle of a transfer."""
    with running("ministack", tmp_path) as server:
        options = server.storage_options
        backend = ObjectBackend(server.url(), storage_options=options, timeout=QUICK, min_nbytes_per_second=2**30)
        backend.put("a", b"x")
        patient = opened(server, url=backend.url)  # a server that was stopped has much to catch up with
        server.pause()
        for call in (lambda: backend.get("a"), lambda: backend.put("b", b"y"), lambda: backend.list("")):
            assert _seconds_to_fail(call) < 30
        server.go_on()
        assert patient.get("a") == b"x"

        stopper = threading.Timer(0.3, server.pause)
        stopper.start()
        assert _seconds_to_fail(lambda: backend.put("big", bytes(400 * 2**20))) < 120
        stopper.join()
        server.go_on()
        assert [entry.key for entry in patient.list("")][:1] == ["a"]
        with pytest.raises(KeyMissing):
            patient.get("big")


def _seconds_to_fail(call: Callable[[], object]) -> float:
    start = time.monotonic()
    with pytest.raises(StorageError):
        call()
    return time.monotonic() - start


def test_a_server_that_comes_back_is_used_again(tmp_path: Path) -> None:
    """Killed and started anew on the same port, with the retries of `open_backend`."""
    with running("rclone", tmp_path) as server:
        backend = open_backend(server.url(), storage_options=server.storage_options)
        backend.put("a", b"x")
        server.stop()
        starter = threading.Timer(0.5, server.start)
        starter.start()
        backend.put("b", b"y")
        starter.join()
        assert [entry.key for entry in backend.list("")] == ["a", "b"]


def test_wrong_keys_and_missing_buckets_are_told_apart(rclone: S3Server) -> None:
    """Each by what the user has to change."""
    wrong = ObjectBackend(rclone.url(), storage_options=rclone.storage_options | {"secret": "no"}, timeout=QUICK)
    with pytest.raises(StorageError, match=r"put a at s3://bucket/.*(403|[Ss]ignature)"):
        wrong.put("a", b"x")
    elsewhere = ObjectBackend("s3://nowhere/run", storage_options=rclone.storage_options, timeout=QUICK)
    with pytest.raises(StorageError, match="no such bucket"):
        elsewhere.put("a", b"x")


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ConfigurationError as error:
        return "spawn" in str(error)
    return False


def test_a_forked_child_is_refused_and_does_not_hang(ministack: S3Server) -> None:
    """The threads that serve the requests were not forked."""
    backend = opened(ministack)
    backend.put("a", b"x")
    child = os.fork()
    if child == 0:
        calls = [
            lambda: backend.get("a"), lambda: backend.put("b", bytes(20 * 2**20)), lambda: backend.create("c", b"x"),
            lambda: backend.list(""), lambda: backend.delete("a"), lambda: backend.sweep(""), lambda: backend.modified("a"),
            lambda: opened(ministack),
        ]  # fmt: skip
        refused = [_is_refused(call) for call in calls]
        del calls, backend
        gc.collect()  # dropping what was inherited is no call either
        os._exit(0 if all(refused) else 1)
    end = time.monotonic() + 30
    while (waited := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert waited[1] == 0


# Options.

SECONDS = {"connect_timeout": timedelta(seconds=3), "read_timeout": timedelta(seconds=9)}


@pytest.mark.parametrize(
    ("given", "config", "client"),
    [
        ({"key": "k", "secret": "s", "token": "t"}, {"access_key_id": "k", "secret_access_key": "s", "session_token": "t"}, {}),
        ({"endpoint_url": "http://h:1"}, {"endpoint": "http://h:1"}, {"allow_http": True}),
        ({"client_kwargs": {"endpoint_url": "https://h", "region_name": "eu"}}, {"endpoint": "https://h", "region": "eu"}, {}),
        ({"anon": True}, {"skip_signature": True}, {}),
        ({"use_ssl": False, "default_fill_cache": False}, {}, {"allow_http": True}),
        ({"client_kwargs": {"verify": False}}, {}, {"allow_invalid_certificates": True}),
        ({"config_kwargs": {"connect_timeout": 3, "read_timeout": 9}}, {}, SECONDS),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, {"virtual_hosted_style_request": True}, {}),
        ({"unsigned_payload": False}, {"unsigned_payload": False}, {}),
        ({"requester_pays": True}, {"request_payer": True}, {}),
        ({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "id"}},
         {"server_side_encryption": "aws:kms", "sse_kms_key_id": "id"}, {}),
        ({"region": "here", "key": None}, {"region": "here"}, {}),
        ({"allow_http": True, "client_options": {"timeout": "9s"}}, {}, {"allow_http": True, "timeout": "9s"}),
    ],
)  # fmt: skip
def test_options_of_s3fs_are_translated(
    given: dict[str, object],
    config: dict[str, object],
    client: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A configuration written for s3fs goes on working."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    found = translate("s3", given)
    assert found.config == {"region": "us-east-1", "unsigned_payload": True} | config
    assert found.client == client
    ObjectBackend("s3://bucket/run", storage_options=given)


@pytest.mark.parametrize(
    ("kind", "given", "config"),
    [
        ("gs", {"token": "anon", "project": "p"}, {"skip_signature": True}),
        ("gs", {"endpoint_url": "http://h:1"}, {"base_url": "http://h:1"}),
        ("az", {"account_name": "n", "account_key": "aGk="}, {"account_name": "n", "account_key": "aGk="}),
        ("az", {"account_name": "n", "sas_token": "sv=1"}, {"account_name": "n", "sas_key": "sv=1"}),
    ],
)
def test_options_of_other_stores_are_translated(kind: str, given: dict[str, object], config: dict[str, object]) -> None:
    """gcsfs and adlfs; the stores open with them."""
    assert translate(kind, given).config == config
    ObjectBackend(f"{kind}://bucket/run", storage_options=given)


@pytest.mark.parametrize(
    "given",
    [
        {"s3_additional_kwargs": {"ACL": "public-read"}},
        {"session": object()},
        {"config_kwargs": {"proxies": {"https": "http://proxy"}}},
        {"nonsense": 1},
    ],
)
def test_an_option_without_a_translation_selects_fsspec_and_says_so(
    given: dict[str, object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing a user asked for is dropped."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigurationError, match=r"[Ii]nstall s3fs"):
        open_backend("s3://bucket/run", storage_options=given)
    assert "obstore has no word for" in caplog.text
    assert str(next(iter(given))) in caplog.text


def test_keys_in_the_files_of_the_aws_tools_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As botocore does, which obstore does not."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = a\naws_secret_access_key = b\n[other]\naws_access_key_id = c\naws_secret_access_key = d\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-1\n[profile other]\nregion = eu-2\n[profile sso]\nsso_start_url = x\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    default, other = translate("s3", {}).config, translate("s3", {"profile": "other"}).config
    assert (default["access_key_id"], default["region"]) == ("a", "eu-1")
    assert (other["access_key_id"], other["secret_access_key"], other["region"]) == ("c", "d", "eu-2")
    assert translate("s3", {"key": "k", "secret": "s"}).config["access_key_id"] == "k"
    with pytest.raises(Unmapped, match="sso"):
        translate("s3", {"profile": "sso"})


def test_missing_keys_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no machine of a cloud has any, either: its address alone would tell a reader nothing."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    backend = open_without_retries("s3://bucket/run", storage_options={"region": "eu-1"})
    with pytest.raises(StorageError, match=r"No keys were given.* Set AWS_ACCESS_KEY_ID"):
        backend.get("a")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket", ("s3", "bucket", "")),
        ("s3a://bucket/", ("s3", "bucket", "")),
        ("S3://bucket/a/b/", ("s3", "bucket", "a/b")),
        ("gcs://bucket/a b/é", ("gs", "bucket", "a b/é")),
        ("abfs://container/x", ("az", "container", "x")),
    ],
)
def test_urls_are_split(url: str, parts: tuple[str, str, str]) -> None:
    """Store, bucket, prefix."""
    assert split_url(url) == parts


@pytest.mark.parametrize("url", ["s3://", "s3:///run"])
def test_urls_that_name_no_place_are_refused(url: str) -> None:
    """With the form that is wanted."""
    with pytest.raises(ConfigurationError, match="wanted `scheme://bucket/path`"):
        open_backend(url)


def test_the_library_is_the_real_one() -> None:
    """What the backend calls is there in the installed version."""
    assert {"put", "get", "get_ranges", "head", "list", "delete"} <= set(dir(obstore))
