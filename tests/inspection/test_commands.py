"""`moe-ckpt ls`, `inspect` and `verify`: what they say, their exit status, and that they leave no trace."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_moe_ckpt.cli import main
from lightning_moe_ckpt.inspection import _answers
from lightning_moe_ckpt.storage import PosixBackend, open_backend
from lightning_moe_ckpt.storage import _catalog as ranges
from lightning_moe_ckpt.storage._fsspec import FsspecBackend


def run_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    """The document a command writes."""
    assert main([*argv, "--json"]) == status
    return dict(json.loads(capsys.readouterr().out))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def copied(run: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_ls_lists_newest_first(capsys: pytest.CaptureFixture[str], sparse_run: str) -> None:
    """A run that ended has a dense generation where it ended, whatever came before."""
    rows = run_json(capsys, "ls", sparse_run)["generations"]
    assert [(row["step"], row["kind"], row["window"], row["first_step"], row["usable"]) for row in rows] == [
        (7, "dense", 1, 7, True),
        (6, "sparse", 2, 5, True),
        (4, "sparse", 2, 3, True),
    ]
    on_disk = sum(len(data) for key, data in contents(Path(sparse_run)).items() if key.endswith(".safetensors"))
    assert sum(row["nbytes"] for row in rows) == on_disk


def test_ls_says_why_a_generation_is_not_usable(
    capsys: pytest.CaptureFixture[str], sparse_run: str, tmp_path: Path
) -> None:
    """Not committed, a manifest gone bad, and a file gone."""
    root = copied(sparse_run, tmp_path)
    folders = sorted((root / "snap").glob("*/i000001-*"))
    (folders[0] / "_COMMITTED").unlink()
    (folders[1] / "_COMMITTED").write_bytes(b"{}")
    next(folders[2].glob("*.safetensors")).unlink()
    rows = run_json(capsys, "ls", str(root))["generations"]
    assert not any(row["usable"] for row in rows)
    assert [row["committed"] for row in rows] == [True, True, False]
    assert "0 of" in rows[0]["why_not"]
    assert "not a document" in rows[1]["why_not"]
    assert "not committed" in rows[2]["why_not"]
    assert main(["inspect", str(root)]) == 2
    assert "no generation that could be restored" in capsys.readouterr().err


def test_tables_are_for_people(capsys: pytest.CaptureFixture[str], sparse_run: str) -> None:
    """Every command without `--json` writes what it found, in full, also into a pipe."""
    for argv, words in [
        (["ls"], ["sparse", "5-6", "newest incarnation 1", "age"]),
        (["inspect", "--step", "6"], ["window=2", "net.0", "compute at", "rank00000.000000000005.safetensors"]),
        (["verify"], ["3 generations read", "5 files", "MiB/s", "good"]),
    ]:
        assert main([argv[0], sparse_run, *argv[1:]]) == 0
        out = capsys.readouterr().out
        assert [word for word in words if word not in out] == []


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "gc --dry-run"])
def test_tables_fit_into_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, partial_run: str
) -> None:
    """Nothing is cut off, no name is broken, and bytes are in MiB."""
    monkeypatch.setattr(_answers, "_PIPE_WIDTH", 80)
    name, *options = command.split()
    assert main([name, partial_run, *options]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert " MiB" in out
    assert not re.search(r"\d (bytes|[kMG]B)\b", out)
    if name == "inspect":
        names = re.findall(r"^(\S*(?:moe|norm|net)\S*) +", out, re.MULTILINE)
        assert "moe/expert.0" in names
        assert names == sorted(names)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: None, "holds no run: there is no such folder"),
        (lambda folder: folder.mkdir(), "holds no run: the folder is empty"),
        (lambda folder: folder.write_text("x"), "holds no run: it is a file"),
        (lambda folder: (folder.mkdir(), (folder / "notes.txt").touch()), "holds no run, but other files: notes.txt"),
    ],
    ids=["missing", "empty", "file", "foreign"],
)
@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "gc"])
def test_a_place_without_a_run_is_described(
    command: str, make: Callable[[Path], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there instead, in one line with status 2, and the path once."""
    folder = tmp_path / "run"
    make(folder)
    assert main([command, str(folder)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count(str(folder)) == 1
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_runs_below_a_folder_are_named(capsys: pytest.CaptureFixture[str], sparse_run: str) -> None:
    """Who gives the folder above is told which to give."""
    assert main(["ls", str(Path(sparse_run).parent)]) == 2
    assert f"folders below it do: {sparse_run}. Give one of these" in capsys.readouterr().err


def test_inspect_tells_who_wrote_what(
    capsys: pytest.CaptureFixture[str], sharded_run: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    """Experts are written by the rank that holds them, the rest by either."""
    found = run_json(capsys, "inspect", sharded_run[0])
    ranks = {row["operator"]: row["ranks"] for row in found["operators"]}
    experts = {name: by for name, by in ranks.items() if "/expert." in name}
    assert list(experts.values()) == [[0], [0], [1], [1]]
    assert (found["policy"]["expert_parallel"], found["optimizer"]) == (2, "AdamW")
    assert [segment["rank"] for segment in found["segments"]] == [0, 1]
    assert sum(segment["nbytes"] for segment in found["segments"]) == found["nbytes"]
    total = sum(kind["nbytes"] for row in found["operators"] for kind in row["kinds"].values())
    assert total == found["kinds"]["full"]["nbytes"]


def test_inspect_shows_a_window_operator_by_operator(capsys: pytest.CaptureFixture[str], sparse_run: str) -> None:
    """Full at one step; compute at the steps before it."""
    found = run_json(capsys, "inspect", sparse_run, "--step", "6")
    steps = {tuple(row["kinds"]["full"]["steps"]) for row in found["operators"]}
    assert steps == {(5,), (6,)}
    late = [row for row in found["operators"] if row["kinds"]["full"]["steps"] == [6]]
    assert all(row["kinds"]["compute"]["steps"] == [5] for row in late)


def test_verify_reads_every_file(capsys: pytest.CaptureFixture[str], sparse_run: str) -> None:
    """Its figures are those of the folder."""
    found = run_json(capsys, "verify", sparse_run)
    files = {key: data for key, data in contents(Path(sparse_run)).items() if key.endswith(".safetensors")}
    assert (found["num_files"], found["nbytes"]) == (len(files), sum(map(len, files.values())))
    assert found["sound"]
    assert found["nbytes_per_second"] > 0
    assert run_json(capsys, "verify", sparse_run, "--step", "6")["generations"] == ["step 6 (incarnation 1)"]


def test_verify_fails_with_one_and_names_the_file(
    capsys: pytest.CaptureFixture[str], sparse_run: str, tmp_path: Path
) -> None:
    """One flipped bit, one file cut, one gone, in three generations."""
    root = copied(sparse_run, tmp_path)
    first, second, third = (
        next(folder.glob("*.safetensors")) for folder in sorted((root / "snap").glob("*/i000001-*"))
    )
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    found = run_json(capsys, "verify", str(root), status=1)
    told = {problem["generation"]: problem["reason"] for problem in found["problems"]}
    assert list(told) == ["step 7 (incarnation 1)", "step 6 (incarnation 1)", "step 4 (incarnation 1)"]
    for path in (first, second, third):
        assert any(path.name in problem["reason"] for problem in found["problems"])


def test_verify_reads_what_no_restart_would_use_only_if_asked(
    capsys: pytest.CaptureFixture[str], dense_run: tuple[str, object], tmp_path: Path
) -> None:
    """A generation of an earlier run lies there until the new run has more than it keeps."""
    root = copied(dense_run[0], tmp_path)
    entry = json.loads((root / "_log" / f"{0:020d}.json").read_text())["document"]["body"]
    history = {**entry["history"], "run_id": "f" * 32, "first_incarnation": 2, "last_incarnation": 1}
    body = {**entry, "index": 9, "history": history}
    from lightning_moe_ckpt.storage._json import encode

    for index in range(len(list((root / "_log").iterdir())), 10):
        (root / "_log" / f"{index:020d}.json").write_bytes(encode("log", {**body, "index": index}))
    assert run_json(capsys, "verify", str(root), status=1)["generations"] == []
    found = run_json(capsys, "verify", str(root), "--all")
    assert found["generations"] == ["step 6 (incarnation 1)", "step 4 (incarnation 1)"]


@pytest.mark.parametrize("command", [["ls"], ["inspect"], ["verify"], ["export"]])
@pytest.mark.parametrize("place", ["missing", "empty", "foreign"])
def test_a_url_without_a_run_is_an_error_and_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], place: str
) -> None:
    """One line on standard error, exit status 2, with `--json` the same as a document, and nothing was made."""
    root = tmp_path / "typo"
    if place != "missing":
        root.mkdir()
    if place == "foreign":
        (root / "incarnation=1.ckpt").write_bytes(b"of somebody else")
    before = sorted(tmp_path.rglob("*"))
    argv = [*command, str(root), *([str(tmp_path / "out.ckpt")] if command == ["export"] else [])]
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "holds no run" in said.err
    error = run_json(capsys, *argv, status=2)["error"]
    assert error["type"] == "NoUsableGeneration"
    assert "holds no run" in error["message"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ls", "nosuch://x"], "nosuch"),
        (["ls", "{run}", "--storage-option", "a=1"], "takes no storage_options"),
        (["inspect", "{run}", "--step", "5"], "no committed generation of step 5"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], dense_run: tuple[str, object], argv: list[str], words: str
) -> None:
    """With what to do, and exit status 2."""
    assert main([word.replace("{run}", dense_run[0]) for word in argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("suffix", [".json", ".done", ".safetensors", "_COMMITTED"])
def test_json_is_one_document_whatever_is_damaged(
    capsys: pytest.CaptureFixture[str], sparse_run: str, tmp_path: Path, suffix: str
) -> None:
    """Every file of a kind overwritten: each command still writes a document, and `verify` fails with 1."""
    root = copied(sparse_run, tmp_path)
    for path in [path for path in root.rglob("*") if path.name.endswith(suffix)]:
        path.write_bytes(b"\xff" * len(path.read_bytes()))
    statuses = {}
    for command in ("ls", "inspect", "verify", "export"):
        out = [str(tmp_path / "out.safetensors")] if command == "export" else []
        statuses[command] = main([command, str(root), *out, "--json"])
        document = json.loads(capsys.readouterr().out)
        assert ("error" in document) == (statuses[command] == 2), command
    assert statuses["ls"] in {0, 2}
    assert statuses["verify"] in {1, 2}
    assert statuses["export"] == 2


_COLD = """
import contextlib, io, os, sys
from lightning_moe_ckpt.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(sys.argv[1:])  # so that children have imported everything
children = []
for more in ([], ["--json"]):
    children.append(os.fork())
    if children[-1] == 0:
        sys.exit(main([*sys.argv[1:], *more]))
sys.stderr.write(str([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""
"""A process of its own, whose children end as an interpreter does: with everything flushed."""


@pytest.mark.soak
def test_a_reader_that_leaves_early_is_no_error(sparse_run: str) -> None:
    """`moe-ckpt inspect URL | head -1`: no traceback, and the status of a closed pipe, whatever is written."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", _COLD, "inspect", sparse_run]
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=PIPE, timeout=300, check=True)
    assert done.stderr == b"[141, 141]"


@pytest.mark.parametrize(("into", "said"), [(">/dev/full", "No space left on device"), (">&-", "is closed")])
def test_output_that_cannot_be_written_is_said(into: str, said: str) -> None:
    """A full disk or a closed descriptor: one sentence, and no traceback."""
    command = ["sh", "-c", f'"$0" -m lightning_moe_ckpt --help {into}', sys.executable]
    done = subprocess.run(command, stderr=PIPE, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"moe-ckpt: standard output")
    assert said.encode() in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_pipe_gets_whole_rows_without_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sparse_run: str
) -> None:
    """Whatever the size of a terminal somewhere: what is piped is searched with grep."""
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["inspect", sparse_run, "--step", "6"]) == 0
    piped = capsys.readouterr().out
    assert re.search(r"^Files in snap/000000000006/i000001-[0-9a-f]{12} *$", piped, re.MULTILINE)
    assert re.search(r" rank00000\.000000000005\.safetensors", piped)
    assert "\x1b" not in piped


def test_a_narrow_terminal_gets_no_longer_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sparse_run: str
) -> None:
    """Forty columns, and no colour where `NO_COLOR` is set."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    for command in ("ls", "inspect", "verify"):
        assert main([command, sparse_run]) == 0
        out = re.sub(r"\x1b\[[013]?m", "", capsys.readouterr().out)  # bold and italic are no colours
        assert "\x1b" not in out
        assert max(map(len, out.splitlines())) <= 40


@pytest.mark.parametrize("command", ["", "ls", "inspect", "verify", "export", "gc", "doctor"])
def test_help_says_what_the_exit_status_means(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Of the program and of each command; every option has a text."""
    assert main([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert "Exit status:" in said
    assert not re.search(r"^  --[a-z-]+( [A-Z=]+)?$\n(?! {10})", said, re.MULTILINE)


def test_looking_changes_nothing(capsys: pytest.CaptureFixture[str], sparse_run: str, tmp_path: Path) -> None:
    """Not even the log: another job may be running on it."""
    root = copied(sparse_run, tmp_path)
    before = contents(root)
    for argv in (["ls"], ["inspect"], ["verify", "--all"]):
        assert main([argv[0], str(root), *argv[1:]]) == 0
    assert main(["export", str(root), str(tmp_path / "out.safetensors")]) == 0
    assert contents(root) == before


def test_storage_options_reach_the_file_system(capsys: pytest.CaptureFixture[str], dense_run: tuple[str, Any]) -> None:
    """Any fsspec URL can be looked at; values are JSON where they can be."""
    MemoryFileSystem.store.clear()
    url = f"memory://{uuid.uuid4().hex}"
    source, target = PosixBackend(dense_run[0]), FsspecBackend(url)
    for entry in source.list(""):
        target.put(entry.key, source.get(entry.key))
    assert run_json(capsys, "verify", url, "--storage-option", "use_listings_cache=false")["sound"]
    with pytest.raises(SystemExit):
        main(["ls", url, "--storage-option", "novalue"])


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 128, 1000])
def test_chunks_are_the_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str, nbytes: int) -> None:
    """Sizes around a chunk, through either kind of backend."""
    monkeypatch.setattr(ranges, "CHUNK_NBYTES", 64)
    backend = open_backend(str(tmp_path) if scheme == "file" else f"memory://{uuid.uuid4().hex}")
    data = bytes(range(251)) * 4
    backend.put("a/b", data[:nbytes])
    assert b"".join(bytes(view) for view in ranges.read_chunks(backend, "a/b", nbytes)) == data[:nbytes]


@pytest.mark.parametrize("chunk", [4096, 4097, 7001, 100_000])
def test_records_may_straddle_chunks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dense_run: tuple[str, Any], chunk: int
) -> None:
    """Wherever chunks end, digests are those of whole records."""
    monkeypatch.setattr(ranges, "CHUNK_NBYTES", chunk)
    assert run_json(capsys, "verify", dense_run[0])["sound"]
