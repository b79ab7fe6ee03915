"""Random damage to every kind of file of a small run: right bits, an older generation with a warning, or an error of ours.

Damage of the medium (`spoil`) is never believed: a resume ends with the bits of the run without it, or does not begin. Who
seals what they changed (`forge`) may have said anything; then all that is asked is that nothing but our errors comes of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from door import CheckpointCallback
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inspection._forge import Forged
from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.errors import CheckpointError

STEPS = 9
SEEDS = st.integers(0, 2**32)
STRANGE: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**80, 0.5, 1e300, "", "x", "0" * 32, "snap/../..", [], {}, [[]],
    [None], {"a": 1}, ["x"], [-1], [2**40], "[" * 5000, "{}", "[]", "\x00",
]  # fmt: skip
"""What documents do not expect."""


def spoil(root: Path, rng: random.Random) -> None:
    """What media, people and other programs do to a file."""
    path = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    other = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    kind = rng.randrange(11)
    if kind == 0 and data:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data) + 1) :]
    elif kind == 2:
        data += rng.randbytes(rng.choice([1, 64, 5000]))
    elif kind == 3:
        data = bytearray(rng.randbytes(rng.choice([0, 1, 100, 5000])))
    elif kind == 4:
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(64)] = rng.randbytes(rng.randrange(64))
    elif kind == 5:
        data = bytearray(other.read_bytes())
    elif kind == 6:
        data = bytearray(len(data))
    path.unlink()
    if kind < 7:
        path.write_bytes(data)
    elif kind == 8:
        os.mkfifo(path)
    elif kind == 9:
        path.symlink_to(other)
    elif kind == 10:
        path.mkdir()


def forge(root: Path, rng: random.Random) -> None:
    """Another value somewhere in a document, whose digests are made right again."""
    run = Forged(root)

    def change(value: Any) -> None:
        mutate(value, rng)

    kind = rng.randrange(8)
    if kind == 0:
        run.change_log(change)
    elif kind == 1:
        run.change_commit(change)
    elif kind == 2:
        run.change_marker(change)
    elif kind == 3:
        run.change_marker(lambda _: None, records=change)
    elif kind == 4:
        run.change_policy(lambda body: mutate(body["policy"], random.Random(rng.random())))
    elif kind == 5:
        module = json.loads(run.marker.read_bytes().splitlines()[-1])
        change(module)
        run.change_module(json.dumps(module).encode() + b"\n")
    elif kind == 6:
        seed = rng.random()
        run.change_plan(lambda plan: mutate(plan, random.Random(seed)))
    else:
        data = bytearray(run.segment.read_bytes())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(rng.choice([8, 600, len(data)]))] = rng.randrange(256)
        run.put_segment(bytes(data))


def mutate(value: Any, rng: random.Random) -> None:
    """Change something within lists and objects."""
    places = list(_places(value))
    holder, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, rng.choice(holder))
    elif kind == 2 and isinstance(holder[key], int):
        holder[key] += rng.choice([-1, 1, 8, 2**32, -(2**32)])
    else:
        holder[key] = rng.choice(STRANGE)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield value, key
        yield from _places(each)


Make = Callable[[str], CheckpointCallback]
MAKES: list[Make] = [
    lambda url: DenseCheckpoint(url, every_n_steps=2, keep=3),
    lambda url: SparseCheckpoint(url, window=2, keep=3),
]


def weights(run: Path, make: Make, seed: int) -> Tensor:
    """After `STEPS` steps, from whatever is stored."""
    torch.manual_seed(seed)
    module = Small()
    train(module, make(str(run)), steps=STEPS)
    return torch.cat([param.detach().flatten() for param in module.parameters()])


@pytest.fixture(scope="session")
def fault_free(dense_run: tuple[str, Any], sparse_run: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Runs to spoil, each with the weights that it ends with."""
    found: list[Any] = []
    for make, url in zip(MAKES, (dense_run[0], sparse_run), strict=True):
        copy = shutil.copytree(url, tmp_path_factory.mktemp("sound") / "run")
        found.append((make, url, weights(copy, make, 1)))
    return found


def survive(fault_free: list[Any], seed: int, *, forged: bool) -> None:
    """Every command, then a resume with other weights to begin with."""
    rng = random.Random(seed)
    make, url, right = fault_free[seed % len(fault_free)]
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        root = shutil.copytree(url, Path(folder) / "run")
        for _ in range(1 if forged else rng.randrange(1, 3)):
            (forge if forged else spoil)(root, rng)
        for argv in (
            ["ls"],
            ["repair"],
            ["inspect"],
            ["verify", "--all"],
            ["gc", "--keep-last", "1", "--verify", "--dry-run"],
        ):
            look(argv[0], str(root), *argv[1:])
        for name in ("m.safetensors", "m.ckpt"):
            look("export", str(root), str(Path(folder) / name))
        logging.getLogger("lightning_moe_ckpt").addHandler(handler)
        try:
            found = weights(root, make, 2)
        except CheckpointError as error:
            assert str(error)  # noqa: PT017  # one of two ends
            return
        finally:
            logging.getLogger("lightning_moe_ckpt").removeHandler(handler)
    assert forged or torch.equal(found, right), warned


def look(*argv: str) -> None:
    words = io.StringIO()
    with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        assert main([*argv]) in {0, 1, 2}, words.getvalue()


@pytest.mark.timeout(120)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_damage_is_never_believed(fault_free: list[Any], seed: int) -> None:
    """A few of many."""
    survive(fault_free, seed, forged=False)


@pytest.mark.timeout(120)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_what_was_made_up_leads_to_errors_of_ours(fault_free: list[Any], seed: int) -> None:
    """A few of many."""
    survive(fault_free, seed, forged=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("forged", [False, True])
@settings(max_examples=500, deadline=None)
@given(seed=SEEDS)
def test_much_damage(fault_free: list[Any], seed: int, *, forged: bool) -> None:
    """Many of many."""
    survive(fault_free, seed, forged=forged)
