"""Multipart uploads to S3 that nobody will finish: found and aborted.

A process that is killed in an upload leaves its parts in the bucket, invisible to listings and paid for. obstore does
not list uploads, so two requests of the S3 interface are made here, signed by hand: ListMultipartUploads and
AbortMultipartUpload. Where the store does not serve them, this user may not, or the credentials come from a service
(an instance's role), a lifecycle rule of the bucket has to do it; that is said once.

Source: AWS Signature Version 4 (Amazon S3 API reference, "Authenticating Requests").
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import logging
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from lightning_moe_ckpt.errors import StorageError

log = logging.getLogger(__name__)

_REFUSALS = {400, 401, 403, 405, 501}
_ROUNDS = 3
"""Parts under way while their upload is aborted keep it listed: it is looked for, and aborted, again."""
_UNSIGNED = "UNSIGNED-PAYLOAD"
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Upload:
    """One multipart upload that is neither completed nor aborted."""

    key: str
    """Within the bucket."""
    upload_id: str


class UnfinishedUploads:
    """Those of one bucket.

    Args:
        bucket: its name.
        config: of the S3 store, in obstore's words, with what it found in the environment.
        client: HTTP options, in obstore's words.
        timeout: seconds for one request.
    """

    page_size = 1000

    def __init__(self, bucket: str, config: Mapping[str, Any], client: Mapping[str, Any], *, timeout: float) -> None:
        self._config, self._timeout = config, timeout
        self._base = _base_url(bucket, config)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_tls(client)))
        self.why_useless: str | None = None
        """Why nothing can be asked; `None` as long as everything could."""

    def abort(self, prefix: str) -> int:
        """Abort every upload to a key that starts with `prefix`.

        Returns:
            How many; zero where the store does not tell.

        Raises:
            StorageError: the store does not answer as it should.
        """
        num_aborted = 0
        for _ in range(_ROUNDS):
            found = self.list(prefix)
            for upload in found:
                log.info("aborting an upload to %s, left by an interrupted write", upload.key)
                self._request("DELETE", f"/{quote(upload.key)}", {"uploadId": upload.upload_id})
            num_aborted += len(found)
            if not found:
                break
        return num_aborted

    def list(self, prefix: str) -> list[Upload]:
        """Uploads under way to keys that start with `prefix`, in this process or any other.

        Raises:
            StorageError: the store does not answer as it should.
        """
        if self.why_useless is None and not self._can_sign:
            self._give_up("its credentials come from a service")
        try:
            return [] if self.why_useless is not None else list(self._pages(prefix))
        except _RefusedError as refused:
            self._give_up(f"it answers {refused}")
            return []

    # For a look at the store itself.

    def begin(self, key: str) -> Upload:
        """Begin an upload, as if to be killed."""
        answer = self._request("POST", f"/{quote(key)}", {"uploads": ""}).decode()
        return Upload(key, _element(answer, "UploadId"))

    def refuses_small_parts(self, key: str) -> bool:
        """Whether an upload of two parts of some bytes is refused."""
        upload, parts = self.begin(key), ""
        for number in (1, 2):
            query = {"partNumber": str(number), "uploadId": upload.upload_id}
            body = b"a small part"
            tag = hashlib.md5(body).hexdigest()  # noqa: S324 - what S3 calls an entity tag
            self._request("PUT", f"/{quote(key)}", query, body)
            parts += f'<Part><PartNumber>{number}</PartNumber><ETag>"{tag}"</ETag></Part>'
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        return self._is_refused("POST", key, {"uploadId": upload.upload_id}, body)

    def refuses_wrong_digest(self, key: str) -> bool:
        """Whether a body that is not the one of its `Content-MD5` is refused."""
        return self._is_refused("PUT", key, {}, b"a body", {"Content-MD5": base64.b64encode(bytes(16)).decode()})

    # -- private

    def _is_refused(
        self, method: str, key: str, query: Mapping[str, str], body: bytes, headers: Mapping[str, str] = _NONE
    ) -> bool:
        try:
            self._request(method, f"/{quote(key)}", query, body, headers)
        except _RefusedError:
            return True
        return False

    @property
    def _can_sign(self) -> bool:
        return bool(self._config.get("skip_signature")) or "access_key_id" in self._config

    def _give_up(self, reason: str) -> None:
        self.why_useless = reason
        log.info(
            "%s cannot be asked for unfinished uploads: %s. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) "
            "removes what killed processes leave",
            self._base,
            reason,
        )

    def _pages(self, prefix: str) -> Iterator[Upload]:
        place: dict[str, str] = {}
        fixed = {"uploads": "", "prefix": prefix, "max-uploads": str(self.page_size)}
        while True:
            page = self._request("GET", "", fixed | place).decode()
            for upload in re.findall(r"<Upload>(.*?)</Upload>", page, flags=re.DOTALL):
                key = _element(upload, "Key")
                if key.startswith(prefix):  # some servers ignore the parameter
                    yield Upload(key, _element(upload, "UploadId"))
            if _element(page, "IsTruncated") != "true":
                return
            place = {
                "key-marker": _element(page, "NextKeyMarker"),
                "upload-id-marker": _element(page, "NextUploadIdMarker"),
            }

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        headers: Mapping[str, str] = _NONE,
    ) -> bytes:
        # In the order and the spelling that the signature is made over.
        url = f"{self._base}{path}?{urlencode(sorted(query.items()), quote_via=quote, safe='')}".rstrip("?")
        signed = {"Content-Type": "application/octet-stream", **headers, **self._signed(method, url)}
        request = urllib.request.Request(url, data=body, method=method, headers=signed)  # noqa: S310 - as configured
        what = f"{method} {url}"
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return b""  # somebody else was faster, or there has never been one
                if error.code in _REFUSALS:
                    raise _RefusedError(f"{error.code} {error.reason}") from error
                raise StorageError(f"{what}: {error.code} {error.reason}.") from error
        except OSError as error:
            raise StorageError(f"{what}: {error}. Check the store and the network.") from error

    def _signed(self, method: str, url: str) -> dict[str, str]:
        """Headers of a request whose body is not signed."""
        if self._config.get("skip_signature"):
            return {}
        return sign(
            method,
            url,
            key=str(self._config["access_key_id"]),
            secret=str(self._config["secret_access_key"]),
            token=self._config.get("session_token"),
            region=str(self._config.get("region", "us-east-1")),
            now=datetime.now(timezone.utc),
        )


class _RefusedError(Exception):
    """The store does not serve this request, to us or to anybody."""


def sign(
    method: str, url: str, *, key: str, secret: str, token: str | None, region: str, now: datetime
) -> dict[str, str]:
    """Headers that sign a request, not its body, by Signature Version 4."""
    parts, moment = urlsplit(url), now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parts.netloc, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": moment}
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = "\n".join((method, parts.path or "/", parts.query, lines, names, _UNSIGNED))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    secret_bytes = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        secret_bytes = hmac.digest(secret_bytes, part.encode(), "sha256")
    credential = f"Credential={key}/{scope}, SignedHeaders={names}, Signature={secret_bytes.hex()}"
    return {**headers, "authorization": f"AWS4-HMAC-SHA256 {credential}"}


def _base_url(bucket: str, config: Mapping[str, Any]) -> str:
    endpoint = str(config.get("endpoint") or f"https://s3.{config.get('region', 'us-east-1')}.amazonaws.com").rstrip(
        "/"
    )
    # With virtual hosts obstore wants the bucket in the endpoint already.
    virtual = str(config.get("virtual_hosted_style_request", "")).lower() == "true" and "endpoint" in config
    return endpoint if virtual else f"{endpoint}/{bucket}"


def _tls(client: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if client.get("root_certificate"):
        context.load_verify_locations(cadata=client["root_certificate"].decode())
    if client.get("allow_invalid_certificates"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _element(text: str, name: str) -> str:
    match = re.search(rf"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
    return html.unescape(match[1]) if match else ""
