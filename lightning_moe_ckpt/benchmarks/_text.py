"""A text that is on every machine: the source of Python's own standard library, as bytes.

Read where Python is installed. It differs between Python versions, so losses compare within one version only. Whole
files go to validation or training by a hash of their content, so that no validation text was trained on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError

_VALIDATION_SHARE = 10
"""One file in ten."""


def library_text() -> tuple[Tensor, Tensor]:
    """Training and validation text, uint8.

    Raises:
        ConfigurationError: this Python has its library in an archive.
    """
    parts: tuple[list[bytes], list[bytes]] = [], []
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if path.parent.name not in {"site-packages", "dist-packages", "test", "encodings", "pydoc_data"}:
            text = path.read_bytes()
            parts[hashlib.sha256(text).digest()[0] * _VALIDATION_SHARE < 256].append(text)
    if not all(parts):
        raise ConfigurationError(
            f"No library source under {root}. Run the benchmark with a Python that has its standard library as .py files."
        )
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


def random_crops(text: Tensor, num_crops: int, length: int, *, seed: int) -> Tensor:
    """Crops from random places: int64 `[num_crops, length]`."""
    generator = torch.Generator().manual_seed(seed)
    start_N = torch.randint(len(text) - length, (num_crops,), generator=generator)
    return text[start_N[:, None] + torch.arange(length)].long()
