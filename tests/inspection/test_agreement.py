"""`verify` says by name what does not fit together, although every digest is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inspection._forge import Forged
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import open_backend

WEIGHT = "net.0.weight"
SHAPE, START, NUMEL, NBYTES, DTYPE = 6, 7, 8, 10, 5


def rows(line: Any, key: str = "param") -> list[list[Any]]:
    """Of the weight, in the line of records."""
    return [row for row in line["rows"] if row[3] == WEIGHT and row[4] == key and row[2] == "full"]


def shape(line: Any) -> None:
    rows(line)[0][SHAPE] = [5, 4]


def moved(line: Any) -> None:
    (row,) = rows(line)
    row[SHAPE], row[START] = [4, 4], 4


def state(line: Any) -> None:
    (row,) = rows(line, "exp_avg")
    row[SHAPE] = [4, 4]


def gone(line: Any) -> None:
    line["digests"].pop(line["rows"].index(rows(line)[0]))
    line["rows"].remove(rows(line)[0])


def twice(line: Any) -> None:
    (row,) = rows(line)
    line["digests"].append(line["digests"][line["rows"].index(row)])
    line["rows"].append(row)


def other_type(line: Any) -> None:
    twice(line)
    row = [*line["rows"].pop()]
    row[DTYPE], row[START] = "I32", 0
    line["rows"].append(row)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (shape, f"`{WEIGHT}`: element 12 of 20 is nowhere stored"),
        (moved, f"`{WEIGHT}`: element 0 of 16 is nowhere stored"),
        (state, f"`{WEIGHT}/exp_avg`: element 12 of 16 is nowhere stored"),
        (gone, f"`{WEIGHT}` is named by the module's description and stored by no rank"),
        (twice, f"`{WEIGHT}`: element 0 is stored twice by rank 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_records_that_do_not_add_up_are_named(
    dense_run: tuple[str, Any], tmp_path: Path, records: Callable[[Any], None], reason: str
) -> None:
    """Shapes, places and names, in markers that the manifest vouches for."""
    root = Path(shutil.copytree(dense_run[0], tmp_path / "run"))
    assert verify(open_backend(str(root))).sound
    Forged(root).change_marker(lambda _: None, records=records)
    reasons = [problem.reason for problem in verify(open_backend(str(root))).problems]
    assert reason in reasons
    assert all(WEIGHT in each for each in reasons)


def test_a_type_that_is_not_that_of_the_file_is_named(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """The header of the segment says which it is."""
    root = Path(shutil.copytree(dense_run[0], tmp_path / "run"))
    Forged(root).change_marker(lambda _: None, records=other_type)
    (problem,) = verify(open_backend(str(root))).problems
    assert WEIGHT in problem.reason
    assert "is not where its marker says" in problem.reason


def test_names_of_the_module_must_be_stored(dense_run: tuple[str, Any], tmp_path: Path) -> None:
    """A group of the optimizer with a parameter that nobody wrote."""
    root = Path(shutil.copytree(dense_run[0], tmp_path / "run"))
    run = Forged(root)
    module = json.loads(run.marker.read_bytes().splitlines()[-1])
    module["param_groups"][0].append("net.9.weight")
    run.change_module(json.dumps(module, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    (problem,) = verify(open_backend(str(root))).problems
    assert problem.reason == "`net.9.weight` is named by the module's description and stored by no rank"
