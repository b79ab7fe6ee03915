"""Multipart uploads to S3 that nobody will finish: found and aborted.

A process that is killed in an upload leaves its parts in the bucket, invisible to listings and paid for. obstore does
not list uploads, botocore does, where it is installed. Where it is not, or the store does not serve such requests, or this
user may not make them, a lifecycle rule of the bucket has to do it; that is said once.
"""

from __future__ import annotations

import base64
import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_moe_ckpt.errors import StorageError

log = logging.getLogger(__name__)

_REFUSALS = {400, 401, 403, 405, 501}
_ROUNDS = 3
"""Parts under way while their upload is aborted keep it listed: it is looked for, and aborted, again."""


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
        config: of the S3 store, in obstore's words; what it lacks, botocore finds as obstore does.
        client: HTTP options, in obstore's words.
        certificates: file with those of authorities to trust.
        timeout: seconds for one request.
    """

    page_size = 1000

    def __init__(
        self,
        bucket: str,
        config: Mapping[str, Any],
        client: Mapping[str, Any],
        *,
        certificates: str | None,
        timeout: float,
    ) -> None:
        self._bucket, self._config, self._http, self._timeout = bucket, config, client, timeout
        self._certificates = certificates
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
                with self._asking("abort_multipart_upload"):
                    self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)
            num_aborted += len(found)
            if not found:
                break
        return num_aborted

    def list(self, prefix: str) -> list[Upload]:
        """Return uploads under way to keys that start with `prefix`, in this process or any other.

        Raises:
            StorageError: the store does not answer as it should.
        """
        found = list[Upload]()
        if self.why_useless is not None:
            return found
        try:
            with self._asking("list_multipart_uploads"):
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self._bucket, Prefix=prefix, PaginationConfig={"PageSize": self.page_size}
                )
                found += [Upload(each["Key"], each["UploadId"]) for page in pages for each in page.get("Uploads", [])]
        except ImportError:
            self._give_up("botocore is not installed (`pip install 'lightning-moe-ckpt[s3]'`)")
        except _RefusedError as refused:
            self._give_up(f"{refused}")
        return [each for each in found if each.key.startswith(prefix)]  # some servers ignore the parameter

    # For a look at the store itself.

    def begin(self, key: str) -> Upload:
        """Begin an upload, as if to be killed."""
        with self._asking("create_multipart_upload"):
            return Upload(key, self._client.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"])

    def refuses_small_parts(self, key: str) -> bool:
        """Return whether an upload of two parts of some bytes is refused."""
        place = {"Bucket": self._bucket, "Key": key, "UploadId": self.begin(key).upload_id}
        parts = [
            {"PartNumber": number, "ETag": self._client.upload_part(**place, PartNumber=number, Body=b"a part")["ETag"]}
            for number in (1, 2)
        ]
        return self._refuses("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})

    def refuses_wrong_digest(self, key: str) -> bool:
        """Return whether a body that is not the one of its `Content-MD5` is refused."""
        digest = base64.b64encode(bytes(16)).decode()
        return self._refuses("put_object", Bucket=self._bucket, Key=key, Body=b"a body", ContentMD5=digest)

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
            self._bucket,
            reason,
        )

    @contextlib.contextmanager
    def _asking(self, operation: str) -> Iterator[None]:
        """Turn exceptions of botocore into ours; of what is not there, nothing needs to be said."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except NoCredentialsError as error:
            raise _RefusedError("no credentials were found") from error
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in _REFUSALS:
                raise _RefusedError(f"it answers {status} {error.response['Error'].get('Code', '')}") from error
            if status != 404:  # somebody else was faster, or there has never been one
                raise StorageError(f"{operation} in {self._bucket}: {error}.") from error
        except BotoCoreError as error:
            raise StorageError(f"{operation} in {self._bucket}: {error} Check the store and the network.") from error

    @cached_property
    def _client(self) -> Any:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config

        config = self._config
        virtual = str(config.get("virtual_hosted_style_request", "")).lower() == "true"
        endpoint = config.get("endpoint")
        if virtual and endpoint:  # obstore wants the bucket in it already
            endpoint = endpoint.replace(f"//{self._bucket}.", "//", 1)
        trusted = not self._http.get("allow_invalid_certificates")
        return botocore.session.get_session().create_client(
            "s3",
            region_name=config.get("region"),
            endpoint_url=endpoint,
            aws_access_key_id=config.get("access_key_id"),
            aws_secret_access_key=config.get("secret_access_key"),
            aws_session_token=config.get("session_token"),
            verify=trusted and self._certificates,
            config=Config(
                signature_version=UNSIGNED if config.get("skip_signature") else None,
                connect_timeout=self._timeout,
                read_timeout=self._timeout,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "virtual" if virtual or not endpoint else "path"},
                request_checksum_calculation="when_required",
            ),
        )


class _RefusedError(StorageError):
    """The store does not serve this request, to us or to anybody."""
