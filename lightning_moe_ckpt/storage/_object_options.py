"""Translate options of s3fs, gcsfs and adlfs into those of obstore.

Other options go to obstore unchanged. An option that obstore does not know selects the fsspec backend, with a warning.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""Kind of store by URL scheme."""


class Unmapped(LookupError):
    """Obstore has no equivalent for an option or for a part of a URL."""


@dataclass(slots=True)
class ObjectOptions:
    """Options for opening a store with obstore."""

    config: dict[str, Any] = field(default_factory=dict)
    """obstore's configuration for the store."""
    client: dict[str, Any] = field(default_factory=dict)
    """obstore's options for the HTTP client."""
    transfer: dict[str, int] = field(default_factory=dict)
    """Transfer options: `part_nbytes`, `max_concurrency`."""
    certificates: str | None = None
    """File with the certificates of trusted authorities."""


Apply = Callable[[ObjectOptions, Any], object]


def translate(kind: str, storage_options: Mapping[str, object]) -> ObjectOptions:
    """Return options of s3fs, gcsfs or adlfs as those of obstore, for the store `s3`, `gs` or `az`. Raises `Unmapped` if obstore does not
    accept a value.
    """
    options = ObjectOptions()
    for key, value in _flat(storage_options):
        word, bare = _SYNONYMS[kind].get(key, key), key.removeprefix("client_options.")
        if not isinstance(word, str):
            word(options, value)
        elif bare in _CLIENT:
            options.client[bare] = value
        elif not isinstance(value, str | int | float):
            raise Unmapped(f"{key}={type(value).__name__}")
        elif key not in _WITHOUT_MEANING:
            options.config[word] = value
    if kind == "s3":
        _finish_s3(options)
    if str(options.config.get("endpoint", "")).startswith("http://"):
        options.client["allow_http"] = True
    return options


def _flat(found: Mapping[str, object], where: str = "") -> Iterator[tuple[str, object]]:
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}{key}.")
        elif value is not None:
            yield f"{where}{key}", value


def _seconds(name: str) -> Apply:
    return lambda options, value: options.client.update({name: timedelta(seconds=float(value))})


def _transfer(name: str) -> Apply:
    return lambda options, value: options.transfer.update({name: int(value)})


def _verify(options: ObjectOptions, value: object) -> None:
    if isinstance(value, str):
        options.certificates, options.client["root_certificate"] = value, Path(value).read_bytes()
    elif not value:
        options.client["allow_invalid_certificates"] = True


def _shared_profile(options: ObjectOptions, value: object) -> None:
    if not (credentials := _shared_credentials(str(value))):
        raise Unmapped(f"profile={value} (no static keys in the shared credentials file)")
    options.config.update({**credentials, **options.config})


def _google_token(options: ObjectOptions, value: object) -> None:
    if value == "anon":
        options.config["skip_signature"] = True
    elif isinstance(value, str) and Path(value).is_file():
        options.config["service_account"] = value
    elif value != "google_default":
        raise Unmapped("this kind of `token`")


_SYNONYMS: Mapping[str, Mapping[str, str | Apply]] = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "requester_pays": "request_payer",
        "client_kwargs.endpoint_url": "endpoint",
        "client_kwargs.region_name": "region",
        "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
        "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
        "client_kwargs.verify": _verify,
        "config_kwargs.connect_timeout": _seconds("connect_timeout"),
        "config_kwargs.read_timeout": _seconds("read_timeout"),
        "config_kwargs.s3.addressing_style": lambda options, value: options.config.update(
            {"virtual_hosted_style_request": value == "virtual"}
        ),
        "default_block_size": _transfer("part_nbytes"),
        "max_concurrency": _transfer("max_concurrency"),
        "profile": _shared_profile,
        "use_ssl": lambda options, value: options.client.update({"allow_http": not value}),
    },
    "gs": {"token": _google_token, "endpoint_url": "base_url"},
    "az": {"sas_token": "sas_key", "anon": "skip_signature", "max_concurrency": _transfer("max_concurrency")},
}
_CLIENT = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
    *("http1_only", "http2_only"),
    *("http2_keep_alive_interval", "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "http2_max_frame_size"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "proxy_url", "randomize_addresses", "timeout", "user_agent"),
}
"""obstore's names of HTTP client options. Given among a store's, they end the process when used."""
_WITHOUT_MEANING = {"default_cache_type", "default_fill_cache", "project", "skip_instance_cache", "use_listings_cache"}
"""Options without effect here: caches, and options for creating buckets."""


def _finish_s3(options: ObjectOptions) -> None:
    """Add settings that botocore finds by itself, but obstore does not."""
    own = {"access_key_id", "skip_signature", "role_arn", "web_identity_token_file"}
    if own.isdisjoint(options.config) and not os.environ.get("AWS_ACCESS_KEY_ID"):
        options.config.update({**_shared_credentials(os.environ.get("AWS_PROFILE", "default")), **options.config})
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options.config.setdefault("region", "us-east-1")
    # Markers hold a digest of every byte; hashing the payload again would cost ten times the CPU of the upload.
    options.config.setdefault("unsigned_payload", True)


def _shared_credentials(profile: str) -> dict[str, str]:
    """Return static keys and region of a profile in the files of the AWS tools; empty if it has no static keys."""
    merged = dict[str, str]()
    for variable, name, section in (
        ("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        parser.read(os.environ.get(variable) or Path.home() / ".aws" / name, encoding="utf-8")
        merged |= dict(parser.items(section)) if parser.has_section(section) else {}
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
    if not names.keys() <= merged.keys():
        return {}
    names |= {"aws_session_token": "session_token", "region": "region", "endpoint_url": "endpoint"}
    return {name: merged[key] for key, name in names.items() if key in merged}


def split_url(url: str) -> tuple[str, str, str]:
    """Return kind of store, bucket or container, and prefix of URLs such as `s3://bucket/prefix`. Raises `ValueError`
    for no bucket, or characters with another meaning in a URL; `Unmapped` for an Azure account in the URL.
    """
    match = re.fullmatch(r"([A-Za-z0-9]+)://([^/@?#]+)(@[^/?#]+)?/*([^?#]*)", url)
    if match is None:
        raise ValueError("no bucket; wanted `scheme://bucket/path`")
    scheme, bucket, account, prefix = match.groups()
    if account:  # abfs://container@account.dfs.core.windows.net/path
        raise Unmapped(f"the account {account} in the URL")
    return SCHEMES[scheme.lower()], bucket, prefix.strip("/")
