"""`moe-ckpt gc`: what it says, its exit status, and a fit that goes on while it works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from servers._s3 import S3Server
from stored._runs import begin, save, steps, stored, write
from typing_extensions import override

from inspection._runs import Small, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.storage import Backend, GenerationId, ObjectBackend, PosixBackend, Retention, open_backend


@pytest.fixture(params=["directory", "moto"])
def place(request: pytest.FixtureRequest, s3: Callable[[str], S3Server], tmp_path: Path) -> tuple[list[str], Backend]:
    """URL with the options that lead there, and the run at it: 0 to 50 all kept, then an incarnation that never committed 55."""
    if request.param == "directory":
        return [str(tmp_path / "run")], run_at(PosixBackend(tmp_path / "run"))
    moto = s3("moto")
    options, url = [f"--storage-option={key}={value}" for key, value in moto.storage_options.items()], moto.url()
    return [url, *options], run_at(open_backend(url, storage_options=moto.storage_options))


def run_at(backend: Backend) -> Backend:
    job = begin(backend)
    for step in range(0, 60, 10):
        save(job, step, Retention(last=100), unix_time=step * 8640)
    write(begin(backend), 55)
    begin(backend)
    return backend


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gc(capsys: pytest.CaptureFixture[str]) -> Said:
    """The command: exit status, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["gc", *argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_it_says_what_goes_then_deletes_exactly_that(place: tuple[list[str], Backend], gc: Said) -> None:
    """A dry run changes nothing; documents name every generation with bytes and reason; a second run finds nothing."""
    argv, backend = place
    rules = ["--keep-last", "1", "--keep-every", "30", "--keep-days", "1", "--json"]
    before = backend.list("")
    status, told, _ = gc(*argv, *rules, "--dry-run")
    assert (status, backend.list("")) == (0, before)
    document = json.loads(told)
    assert {row["step"]: row["reason"] for row in document["goes"]} == {
        10: "below the watermark 30",
        20: "below the watermark 30",
        55: "not committed, and incarnation 2 is over",
    }
    assert {row["step"]: row["reason"] for row in document["stays"]} == {
        0: "first at or after step 0",
        30: "first at or after step 30",
        40: "within 1 days",
        50: "among the last 1",
    }
    status, done, _ = gc(*argv, *rules)
    assert (status, json.loads(done)) == (0, {**document, "deleted": True})
    kept = {entry.key for entry in backend.list("snap/")}
    gone = [entry for entry in before if entry.key.startswith("snap/") and entry.key not in kept]
    assert sum(entry.nbytes for entry in gone) == document["nbytes"] == sum(row["nbytes"] for row in document["goes"])
    assert stored(backend) == [0, 30, 40, 50]
    assert json.loads(gc(*argv, *rules)[1])["goes"] == []
    assert steps(begin(backend)) == [0, 30, 40, 50]


def test_without_rules_only_what_was_given_up_goes(place: tuple[list[str], Backend], gc: Said) -> None:
    """And the table says so in words."""
    argv, backend = place
    status, said, errors = gc(*argv)
    assert (status, errors) == (0, "")
    fates = {int(step): fate for step, fate in re.findall(r"^ *(\d+) .* MiB  (deleted|stays) ", said, re.MULTILINE)}
    assert fates == {55: "deleted", **dict.fromkeys(range(0, 60, 10), "stays")}
    assert "not committed, and incarnation 2 is over" in said
    assert "deleted: 1 generations" in said
    assert stored(backend) == list(range(0, 60, 10))


def test_the_program_does_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the function that the program is installed for."""
    (program,) = entry_points(group="console_scripts", name="moe-ckpt")
    assert program.load() is main
    run_at(PosixBackend(tmp_path))
    assert main(["gc", str(tmp_path), "--keep-last=1", "--json"]) == 0
    said = capsys.readouterr()
    assert (len(json.loads(said.out)["goes"]), said.err) == (6, "")
    assert stored(PosixBackend(tmp_path)) == [50]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "holds no run"),
        (["nowhere", "--keep-last", "0"], "`Retention(last=0)` must be 1 or more"),
        (["nowhere", "--keep-days", "nan"], "`Retention(days=nan)` must be above zero"),
        (["nowhere", "--keep-every", "-5"], "`Retention(every_n_steps=-5)` must be 1 or more"),
    ],
)
def test_what_it_cannot_do_it_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], message: str
) -> None:
    """In one line and with status 2; as a document too, if asked."""
    assert main(["gc", str(tmp_path / argv[0]), *argv[1:], "--json"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert message in json.loads(captured.out)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


class CollectsGarbage(Callback):
    """Runs the command after every step, as somebody else might."""

    def __init__(self, url: str, *rules: str) -> None:
        self.argv = ["gc", url, *rules, "--json"]
        self.statuses: set[int] = set()

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.statuses.add(main(self.argv))


@pytest.mark.parametrize("rules", [(), ("--keep-last=1",), ("--keep-last=1", "--keep-every=4")])
def test_a_fit_goes_on_while_garbage_is_collected(tmp_path: Path, rules: tuple[str, ...]) -> None:
    """To the same weights as without, and what it leaves can be resumed from."""
    modules, collects = [], CollectsGarbage(str(tmp_path / "beside"), *rules)
    for name in ("alone", "beside"):
        torch.manual_seed(1)
        url, module = str(tmp_path / name), Small()
        others = [collects] if name == "beside" else []
        train(module, SparseCheckpoint(url, window=2, keep=4), *others, steps=12)
        modules.append(module)
    assert collects.statuses == {0}
    for alone, beside in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(alone, beside)
    backend = open_backend(str(tmp_path / "beside"))
    assert steps(begin(backend))[-1] == 12
    entries = [json.loads(backend.get(entry.key))["document"]["body"]["event"] for entry in backend.list("_log/")]
    assert {"run", "open"} <= {event["type"] for event in entries}
    assert ("watermark" in {event["type"] for event in entries}) or not rules


def rows(said: str, heap: str) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in json.loads(said)[heap]}


def test_what_interrupted_writes_left_is_shown_and_goes_with_the_life_that_left_it(tmp_path: Path, gc: Said) -> None:
    """Of generations of which nothing else is there; those of the newest incarnation may be under way, and stay."""
    backend = run_at(PosixBackend(tmp_path))
    over, under_way = (
        tmp_path / GenerationId(53, 2, "0123456789ab").prefix,
        tmp_path / GenerationId(57, 3, "0123456789ab").prefix,
    )
    for folder in (over, under_way):
        folder.mkdir(parents=True)
        (folder / f"r00000.{'a' * 32}.tmp").write_bytes(bytes(1000))
    before = sorted(tmp_path.rglob("*"))
    status, told, _ = gc(str(tmp_path), "--json", "--dry-run")
    assert (status, sorted(tmp_path.rglob("*"))) == (0, before)
    left = rows(told, "goes")[53]
    assert (left["objects"], left["unfinished"], left["nbytes"]) == (0, 1, 1000)
    assert left["reason"] == "not committed, and incarnation 2 is over"
    assert rows(told, "stays")[57]["unfinished"] == 1
    assert "0 + 1 unfinished" in gc(str(tmp_path), "--dry-run")[1]
    status, done, _ = gc(str(tmp_path), "--json")
    assert (status, rows(done, "goes")) == (0, rows(told, "goes"))
    assert not over.exists()
    assert len(list(under_way.iterdir())) == 1
    assert stored(backend) == list(range(0, 60, 10))


@pytest.mark.soak
@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_uploads_that_nobody_finishes_are_shown_too(place: tuple[list[str], Backend], gc: Said) -> None:
    """As the store lists them; a key that has only those is no generation otherwise."""
    argv, _ = place
    options = dict(each.removeprefix("--storage-option=").split("=", 1) for each in argv[1:])
    raw = ObjectBackend(argv[0], storage_options=options)
    assert raw.unfinished is not None
    raw.unfinished.begin(raw.full_key(f"{GenerationId(53, 2, '0123456789ab').prefix}r00000.safetensors"))
    assert rows(gc(*argv, "--json", "--dry-run")[1], "goes")[53]["unfinished"] == 1
    assert gc(*argv)[0] == 0
    assert raw.unfinished.list(raw.full_key("")) == []


def test_damaged_generations_do_not_count_as_kept_if_files_are_read_first(tmp_path: Path, gc: Said) -> None:
    """A bit has turned in the newest: its size is right, and whoever keeps the last one keeps the one before too."""
    train(Small(), DenseCheckpoint(tmp_path, every_n_steps=2, keep=100), steps=6)
    assert set(rows(gc(str(tmp_path), "--keep-last=1", "--verify", "--json", "--dry-run")[1], "stays")) == {6}
    segment = max(tmp_path.glob("snap/*6/i000001-*/*.safetensors"))
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    segment.chmod(0o600)
    segment.write_bytes(raw)
    status, told, _ = gc(str(tmp_path), "--keep-last=1", "--verify", "--json", "--dry-run")
    assert status == 0
    stays = rows(told, "stays")
    assert set(stays) == {4, 6}
    assert stays[6]["reason"].startswith("damaged: ")
    assert stays[4]["reason"] == "among the last 1"
    assert set(rows(gc(str(tmp_path), "--keep-last=1", "--json", "--dry-run")[1], "stays")) == {6}, "if they are not"
    assert gc(str(tmp_path), "--keep-last=1", "--verify")[0] == 0
    assert stored(PosixBackend(tmp_path)) == [4, 6]


def test_there_is_nothing_to_verify_if_nothing_is_given_up(tmp_path: Path, gc: Said) -> None:
    """It says which other command reads files."""
    run_at(PosixBackend(tmp_path))
    status, _, errors = gc(str(tmp_path), "--verify")
    assert status == 2
    assert "moe-ckpt verify" in errors
