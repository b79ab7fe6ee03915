"""A text corpus that is on every machine: the source of Python's own standard library, and the text of its `help()`.

About 10 MB under the PSF licence (a few files carry their own notices), read where Python is installed and never
copied elsewhere. It differs between Python versions, so losses compare within one version only; `Corpus` records both
its SHA-256 and the version. Honest baselines on Python 3.11: zlib -9 needs 1.94 bits per byte, xz 1.53.

Whole files go to validation or training by a hash of their content, so that no validation text was trained on.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Tests repeat themselves, encodings are tables, the rest is not the library's own or differs between installations.
LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
)
VALIDATION_SHARE = 10  # one file in ten


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text, as bytes, in two parts."""

    train: Tensor
    """uint8, one dimension."""
    validation: Tensor
    """uint8, one dimension."""
    sha256: str
    """Over both parts, training first."""
    python: str
    """Version of the Python whose library this is."""


def load_corpus() -> Corpus:
    """Read the corpus of the running Python; well under a second.

    Raises:
        RuntimeError: this Python has no library source on disk (it runs from a zip archive, say).
    """
    parts: tuple[list[bytes], list[bytes]] = [], []
    for text in _texts():
        parts[_is_validation(text)].append(text)
    train, validation = (b"\n".join(part) for part in parts)
    if not train or not validation:
        raise RuntimeError(
            f"No library source under {sysconfig.get_path('stdlib')}. Run the example with a Python that has its "
            "standard library as .py files on disk."
        )
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        sha256=hashlib.sha256(train + validation).hexdigest(),
        python=platform.python_version(),
    )


def _texts() -> Iterator[bytes]:
    """Library files by path, then the topics of `help()` by name: an order that every machine agrees on."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix()):
        yield path.read_bytes()
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:  # some distributions ship it in a package of its own
        return
    yield from (topics[name].encode() for name in sorted(topics))


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        # _sysconfigdata holds the paths and flags of one build of Python.
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            yield path
        elif path.is_dir() and path.name not in LEFT_OUT:
            yield from _sources(path)


def _is_validation(text: bytes) -> bool:
    return hashlib.sha256(text).digest()[0] * VALIDATION_SHARE < 256


class RandomCrops(Dataset[tuple[Tensor, Tensor]]):
    """Random windows of a text. Crop `i` depends on `seed` and `i` only: no generator has a state that could be lost.

    Args:
        text: uint8, one dimension.
        length: bytes the model sees at once; a crop holds one more, the last target.
        size: number of crops.
        seed: another seed is another set of crops.
    """

    def __init__(self, text: Tensor, *, length: int, size: int, seed: int) -> None:
        if len(text) <= length:
            raise ValueError(f"`RandomCrops(length={length})` needs a longer text than {len(text)} bytes.")
        self.text, self.length, self.size, self.seed = text, length, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Input and target, int64 of shape `[length]`, the target one byte further on."""
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "little") % (len(self.text) - self.length)
        crop = self.text[start : start + self.length + 1].long()
        return crop[:-1], crop[1:]


class TextCrops(LightningDataModule):
    """Crops of the standard library for training and validation.

    Args:
        context: bytes per crop.
        batch_size: crops per step and process.
        train_crops: crops per epoch, over all processes.
        val_crops: crops per validation, over all processes; always the same ones.
        seed: of the crops. The order of an epoch is the sampler's business.
    """

    def __init__(
        self,
        context: int = 64,
        batch_size: int = 8,
        train_crops: int = 4800,
        val_crops: int = 192,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.context, self.batch_size, self.seed = context, batch_size, seed
        self.train_crops, self.val_crops = train_crops, val_crops

    @cached_property
    def corpus(self) -> Corpus:
        return load_corpus()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        crops = RandomCrops(self.corpus.train, length=self.context, size=self.train_crops, seed=self.seed)
        return DataLoader(crops, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        crops = RandomCrops(self.corpus.validation, length=self.context, size=self.val_crops, seed=self.seed + 1)
        return DataLoader(crops, batch_size=self.batch_size)
