"""Options of s3fs, gcsfs and adlfs in the words of obstore.

Users know the fsspec spelling, and their configuration files have it. Every key is in a table here: translated, known
to have no meaning for us, or unmapped, and then the caller uses the fsspec backend and says which key made it do so.
Keys in obstore's own spelling pass as they are.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""URL schemes by the kind of store behind them."""


class Unmapped(LookupError):
    """A key that obstore has no word for; the message is the key, with its place."""


@dataclass(slots=True)
class ObjectOptions:
    """What a store is opened with."""

    config: dict[str, Any] = field(default_factory=dict)
    """Configuration of the store, in obstore's words."""
    client: dict[str, Any] = field(default_factory=dict)
    """HTTP client."""
    retry: dict[str, Any] = field(default_factory=dict)
    """Retries of one request."""
    transfer: dict[str, int] = field(default_factory=dict)
    """`part_nbytes`, `max_concurrency`."""


Apply = Callable[[ObjectOptions, Any], None]


def translate(kind: str, storage_options: Mapping[str, object]) -> ObjectOptions:
    """Options for obstore.

    Args:
        kind: `s3`, `gs` or `az`.
        storage_options: as for s3fs, gcsfs or adlfs, or in obstore's own words.

    Raises:
        Unmapped: a key is in no table.
    """
    options = ObjectOptions()
    _walk(options, _TABLES[kind], storage_options, _NATIVE[kind], "")
    if kind == "s3":
        _finish_s3(options)
    if str(options.config.get("endpoint", "")).startswith("http://"):
        options.client["allow_http"] = True
    return options


def _walk(
    options: ObjectOptions, table: Mapping[str, Apply], found: Mapping[str, object], native: set[str], where: str
) -> None:
    for key, value in found.items():
        if value is None:
            continue
        if key in table:
            table[key](options, value)
        elif key in native:
            options.config[key] = value
        else:
            raise Unmapped(f"{where}{key}")


def _config(name: str) -> Apply:
    return lambda options, value: options.config.__setitem__(name, value)


def _client(name: str) -> Apply:
    return lambda options, value: options.client.__setitem__(name, value)


def _seconds(name: str) -> Apply:
    return lambda options, value: options.client.__setitem__(name, f"{float(value)}s")


def _transfer(name: str) -> Apply:
    return lambda options, value: options.transfer.__setitem__(name, int(value))


def _without_meaning(options: ObjectOptions, value: object) -> None:
    """Caches, event loops and the like, which we do not use."""


def _nested(table: Mapping[str, Apply], where: str) -> Apply:
    return lambda options, value: _walk(options, table, value, set(), f"{where}.")


def _verify(options: ObjectOptions, value: object) -> None:
    if isinstance(value, str):
        options.client["root_certificate"] = Path(value).read_bytes()
    elif not value:
        options.client["allow_invalid_certificates"] = True


def _use_ssl(options: ObjectOptions, value: object) -> None:
    options.client["allow_http"] = not value


def _addressing(options: ObjectOptions, value: object) -> None:
    if value in {"path", "virtual"}:
        options.config["virtual_hosted_style_request"] = value == "virtual"


def _payload_signing(options: ObjectOptions, value: object) -> None:
    options.config["unsigned_payload"] = not value


def _signature_version(options: ObjectOptions, value: object) -> None:
    if value == "unsigned" or type(value).__name__ == "object":  # botocore.UNSIGNED is a bare object
        options.config["skip_signature"] = True
    elif value not in {"s3v4", "v4"}:
        raise Unmapped(f"config_kwargs.signature_version={value}")


def _attempts(options: ObjectOptions, value: object) -> None:
    if not isinstance(value, Mapping) or set(value) - {"max_attempts", "total_max_attempts", "mode"}:
        raise Unmapped(f"config_kwargs.retries={value}")
    for name in ("max_attempts", "total_max_attempts"):
        if name in value:
            options.retry["max_retries"] = int(value[name])


def _encryption(options: ObjectOptions, value: object) -> None:
    options.config["server_side_encryption"] = value


def _shared_profile(options: ObjectOptions, value: object) -> None:
    credentials = shared_credentials(str(value))
    if not credentials:
        raise Unmapped(f"profile={value} (no static keys in the shared credentials file)")
    for key, secret in credentials.items():
        options.config.setdefault(key, secret)


def _google_token(options: ObjectOptions, value: object) -> None:
    if value == "anon":
        options.config["skip_signature"] = True
    elif isinstance(value, str) and Path(value).is_file():
        options.config["service_account"] = value
    elif value != "google_default":
        raise Unmapped(f"token={value if isinstance(value, str) else type(value).__name__}")


_CLIENT_KWARGS: Mapping[str, Apply] = {
    "endpoint_url": _config("endpoint"),
    "region_name": _config("region"),
    "aws_access_key_id": _config("access_key_id"),
    "aws_secret_access_key": _config("secret_access_key"),
    "aws_session_token": _config("session_token"),
    "use_ssl": _use_ssl,
    "verify": _verify,
}

_CONFIG_KWARGS: Mapping[str, Apply] = {
    "region_name": _config("region"),
    "connect_timeout": _seconds("connect_timeout"),
    "read_timeout": _seconds("read_timeout"),
    "max_pool_connections": _without_meaning,
    "tcp_keepalive": _without_meaning,
    "user_agent": _client("user_agent"),
    "user_agent_extra": _client("user_agent"),
    "signature_version": _signature_version,
    "retries": _attempts,
    # Our own digest is in the marker, so neither of these is asked of the store.
    "request_checksum_calculation": _without_meaning,
    "response_checksum_validation": _without_meaning,
    "s3": _nested({"addressing_style": _addressing, "payload_signing_enabled": _payload_signing}, "config_kwargs.s3"),
}

_S3_ADDITIONAL: Mapping[str, Apply] = {
    "ServerSideEncryption": _encryption,
    "SSEKMSKeyId": _config("sse_kms_key_id"),
    "BucketKeyEnabled": _config("sse_bucket_key_enabled"),
    "RequestPayer": _config("request_payer"),
}

_FSSPEC = dict.fromkeys(
    ("asynchronous", "loop", "skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths"),
    _without_meaning,
) | dict.fromkeys(("default_cache_type", "default_fill_cache", "cache_regions", "batch_size"), _without_meaning)

_TABLES: Mapping[str, Mapping[str, Apply]] = {
    "s3": {
        **_FSSPEC,
        "key": _config("access_key_id"),
        "username": _config("access_key_id"),
        "secret": _config("secret_access_key"),
        "password": _config("secret_access_key"),
        "token": _config("session_token"),
        "anon": _config("skip_signature"),
        "endpoint_url": _config("endpoint"),
        "profile": _shared_profile,
        "use_ssl": _use_ssl,
        "requester_pays": _config("request_payer"),
        "default_block_size": _transfer("part_nbytes"),
        "max_concurrency": _transfer("max_concurrency"),
        "fixed_upload_size": _without_meaning,
        "client_kwargs": _nested(_CLIENT_KWARGS, "client_kwargs"),
        "config_kwargs": _nested(_CONFIG_KWARGS, "config_kwargs"),
        "s3_additional_kwargs": _nested(_S3_ADDITIONAL, "s3_additional_kwargs"),
    },
    "gs": {
        **_FSSPEC,
        "token": _google_token,
        "endpoint_url": _config("base_url"),
        "project": _without_meaning,
        "consistency": _without_meaning,
        "access": _without_meaning,
        "block_size": _transfer("part_nbytes"),
    },
    "az": {
        **_FSSPEC,
        "account_name": _config("account_name"),
        "account_key": _config("account_key"),
        "sas_token": _config("sas_key"),
        "tenant_id": _config("tenant_id"),
        "client_id": _config("client_id"),
        "client_secret": _config("client_secret"),
        "anon": _config("skip_signature"),
        "blocksize": _transfer("part_nbytes"),
        "max_concurrency": _transfer("max_concurrency"),
    },
}

_NATIVE = {
    "s3": {
        "access_key_id", "secret_access_key", "session_token", "region", "endpoint", "virtual_hosted_style_request",
        "unsigned_payload", "skip_signature", "server_side_encryption", "sse_kms_key_id", "sse_bucket_key_enabled",
        "request_payer", "checksum_algorithm", "conditional_put", "disable_tagging", "role_arn", "role_session_name",
        "web_identity_token_file", "metadata_endpoint", "sts_endpoint",
    },
    "gs": {"service_account", "service_account_key", "application_credentials", "bearer_token", "base_url", "skip_signature"},
    "az": {"sas_key", "authority_host", "endpoint", "use_azure_cli", "use_emulator", "federated_token_file", "skip_signature"},
}  # fmt: skip


def _finish_s3(options: ObjectOptions) -> None:
    """What botocore would find by itself and obstore does not."""
    own = {"access_key_id", "skip_signature", "role_arn", "web_identity_token_file"}
    if own.isdisjoint(options.config) and not os.environ.get("AWS_ACCESS_KEY_ID"):
        for key, value in shared_credentials(os.environ.get("AWS_PROFILE", "default")).items():
            options.config.setdefault(key, value)
    if "region" not in options.config and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options.config["region"] = "us-east-1"
    # A digest of every byte is in our marker; signing the payload too would cost ten times the CPU of the upload.
    options.config.setdefault("unsigned_payload", True)


_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AWS_ENDPOINT": "endpoint",
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_DEFAULT_REGION": "region",
    "AWS_REGION": "region",
}


def environment_s3() -> dict[str, str]:
    """What obstore finds in the environment and does not tell, in its words."""
    return {name: os.environ[variable] for variable, name in _ENVIRONMENT.items() if os.environ.get(variable)}


def shared_credentials(profile: str) -> dict[str, str]:
    """Static keys and region of a profile in the files of the AWS tools; empty if it has no static keys."""
    credentials = _read_ini("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    config = _read_ini("AWS_CONFIG_FILE", "config")
    section = "default" if profile == "default" else f"profile {profile}"
    merged = {**_section(config, section), **_section(credentials, profile)}
    names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
    if not names.keys() <= merged.keys():
        return {}
    names |= {"aws_session_token": "session_token", "region": "region", "endpoint_url": "endpoint"}
    return {name: merged[key] for key, name in names.items() if key in merged}


def _read_ini(variable: str, name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.read(os.environ.get(variable) or Path.home() / ".aws" / name, encoding="utf-8")
    return parser


def _section(parser: configparser.RawConfigParser, name: str) -> dict[str, str]:
    return dict(parser.items(name)) if parser.has_section(name) else {}


def split_url(url: str) -> tuple[str, str, str]:
    """Kind of store, bucket or container, and prefix of `s3://bucket/prefix` and its like.

    Raises:
        ValueError: no bucket, or characters that a URL would need for something else.
    """
    match = re.fullmatch(r"([A-Za-z0-9]+)://([^/@?#]+)(@[^/?#]+)?/*([^?#]*)", url)
    if match is None:
        raise ValueError("no bucket; wanted `scheme://bucket/path`")
    scheme, bucket, account, prefix = match.groups()
    if account:  # abfs://container@account.dfs.core.windows.net/path
        raise Unmapped(f"the account {account} in the URL")
    return SCHEMES[scheme.lower()], bucket, prefix.strip("/")
