"""Find and abort incomplete multipart uploads to S3.

A process killed during an upload leaves parts in the bucket, invisible to listings but paid for. obstore cannot list
uploads, botocore can. If botocore is not installed, or the store refuses such requests, the bucket needs a lifecycle
rule; a warning says so once.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import StorageError

log = rank_logger(__name__)

_REFUSALS = {400, 401, 403, 405, 501}
_ROUNDS = 3
"""How often uploads are listed and aborted: parts sent during an abort keep the upload in the listing."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Multipart upload that is neither completed nor aborted."""

    key: str
    """Key within the bucket."""
    upload_id: str


class UnfinishedUploads:
    """The incomplete uploads of one bucket.

    Args:
        bucket: the bucket's name.
        config: obstore's configuration of the store; botocore finds missing values where obstore does.
        client: obstore's HTTP options.
        certificates: file with certificates of trusted authorities.
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
        """Reason why the store cannot be asked; `None` as long as none is known."""

    def abort(self, prefix: str) -> int:
        """Abort every upload to a key that starts with `prefix`.

        Returns:
            Number of aborted uploads; zero if the store cannot be asked.

        Raises:
            StorageError: a request failed.
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
        """List incomplete uploads to keys that start with `prefix`, by this process or any other.

        Raises:
            StorageError: a request failed.
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
            self._give_up("botocore is not installed (`python -m pip install botocore`)")
        except _RefusedError as refused:
            self._give_up(f"{refused}")
        return [each for each in found if each.key.startswith(prefix)]  # some servers ignore the parameter

    # For tests of the store itself.

    def begin(self, key: str) -> Upload:
        with self._asking("create_multipart_upload"):
            return Upload(key, self._client.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"])

    def refuses_small_parts(self, key: str) -> bool:
        place = {"Bucket": self._bucket, "Key": key, "UploadId": self.begin(key).upload_id}
        parts = [
            {"PartNumber": number, "ETag": self._client.upload_part(**place, PartNumber=number, Body=b"a part")["ETag"]}
            for number in (1, 2)
        ]
        return self._refuses("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})

    def refuses_wrong_digest(self, key: str) -> bool:
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
        """Turn exceptions of botocore into `StorageError`s; a missing upload is no error."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except NoCredentialsError as error:
            raise _RefusedError("no credentials were found") from error
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in _REFUSALS:
                raise _RefusedError(f"it answers {status} {error.response['Error'].get('Code', '')}") from error
            if status != 404:  # another process was faster, or there never was such an upload
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
        if virtual and endpoint:  # for obstore the endpoint already contains the bucket
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
    """The store does not support this request, or this user may not make it."""
