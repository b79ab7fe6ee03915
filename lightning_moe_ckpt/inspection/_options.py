"""What commands that take a URL have in common: options of its store, and how they end where it fails them."""

from __future__ import annotations

import argparse
import json
import sys

from lightning_moe_ckpt.errors import CheckpointError


def add_storage_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--storage-option`."""
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        type=_option,
        metavar="KEY=VALUE",
        help="as in storage_options of the callback; VALUE is JSON or else text. Repeat for more",
    )


def report_failure(url: str, error: CheckpointError, *, as_json: bool) -> int:
    """Say in a line why the command could not do its work; returns its exit status."""
    reason = " ".join(str(error).split())
    sys.stderr.write(f"moe-ckpt {url}: {reason}\n")
    if as_json:
        document = {"url": url, "error": {"type": type(error).__name__, "message": reason}}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 2


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"`{text}` must be two words joined by =")
    return key, value


def _option(text: str) -> tuple[str, object]:
    key, value = pair(text)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
