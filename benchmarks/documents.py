"""Documents that figures are kept in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Put JSON of values and dataclasses into `path`, whole or not at all."""
    staged = path.with_name(f".{path.name}")
    staged.write_text(json.dumps(document, indent=1, default=asdict) + "\n", encoding="utf-8")
    staged.replace(path)
