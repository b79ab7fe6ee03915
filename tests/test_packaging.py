"""The wheel is the tree: what is imported from a checkout is what a user installs."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_moe_ckpt import cli
from lightning_moe_ckpt.native._prototypes import ABI

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_moe_ckpt"
BUILT_FROM = [
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    PACKAGE,
    "callbacks",
    "ext",
]
COMPILED = {".so", ".pyd", ".dylib", ".pyc"}
CXX = shutil.which(os.environ.get("CXX", "g++"))
CUDA_PART = ROOT / PACKAGE / "native" / "libmoe_ckpt_cuda.so"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def test_the_lowest_versions_are_those_that_are_declared() -> None:
    """`make versions` tries what pyproject.toml promises."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert declared is not None
    pinned = re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "tests/versions/lowest.txt").read_text("utf-8"), re.MULTILINE)
    bounds = re.findall(r'"(\w+)>=([\d.]+)', declared[1])
    assert [(name, _numbers(version)) for name, version in pinned] == [(n, _numbers(v)) for n, v in bounds]


def _numbers(version: str) -> list[int]:
    """Without zeros at the end: 2.6 is 2.6.0."""
    return [int(each) for each in re.sub(r"(\.0)+$", "", version).split(".")]


def _pythons() -> list[str]:
    """Interpreters of other versions that are on this machine, and this one."""
    found = [sys.executable]
    for name in (f"python{version}" for version in PYTHONS):
        path = shutil.which(name)
        # A launcher may be there for a version that is not.
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            found.append(path)
    return found


def _contents(folder: Path, prefix: str) -> dict[str, bytes]:
    """Every file below `folder` that belongs to a release, by its name in the wheel; links are not followed."""
    found = {}
    for path in folder.rglob("*"):
        linked = any(parent.is_symlink() for parent in path.parents if folder in parent.parents)
        if path.is_file() and not path.is_symlink() and not linked and path.suffix not in COMPILED:
            found[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive of a copy of the tree, so that no build folder is left here and none is picked up, and a wheel
    that was built from that archive.
    """
    source = tmp_path_factory.mktemp("source")
    leave_out = shutil.ignore_patterns("__pycache__", "*.so", "build", "*.egg-info")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leave_out)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    environment = {**os.environ, "MOE_CKPT_CUDA": "0"}
    if CXX:  # without optimization, which nothing here looks at and which takes most of the time
        compiler = source / "g++"
        compiler.write_text(f'#!/bin/sh\nexec "{CXX}" "$@" -O0\n')
        compiler.chmod(0o700)
        environment |= {"CXX": str(compiler)}
    if CUDA_PART.exists():
        # Compiling it takes longer than all the rest: this nvcc links to what was compiled in place.
        nvcc = source / "nvcc"
        nvcc.write_text(f'#!/bin/bash\ncase "$*" in *-shared*) cp "{CUDA_PART}" "${{@: -1}}" ;; esac\n')
        nvcc.chmod(0o700)
        environment |= {"MOE_CKPT_CUDA": "1", "MOE_CKPT_CUDA_ARCHS": "90", "NVCC": str(nvcc)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel_path(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_path)


def test_one_wheel_serves_every_version_of_python(wheel_path: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The libraries hold no Python: the tag says so, and every interpreter at hand loads the same file."""
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel_path.name)
    built = {"cpu": CXX, "cuda": CUDA_PART.exists()}
    names = {f"{PACKAGE}/native/libmoe_ckpt_{part}.so": part for part, is_there in built.items() if is_there}
    assert {name for name in wheel.namelist() if Path(name).suffix in COMPILED} == set(names)
    for name, part in names.items():
        path = wheel.extract(name, tmp_path)
        code = f"import ctypes; print(ctypes.CDLL({path!r}).moe_{part}_abi())"
        for python in _pythons():
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
            assert done.stdout.strip() == str(ABI), (python, done.stderr)


@pytest.mark.skipif(not CUDA_PART.exists(), reason="the CUDA part was not built here: `moe-ckpt doctor` says why")
def test_a_wheel_carries_the_cuda_part(wheel: zipfile.ZipFile) -> None:
    """Most machines that have a GPU have no nvcc; it is small enough to be in every wheel."""
    assert 10**5 < wheel.getinfo(f"{PACKAGE}/native/libmoe_ckpt_cuda.so").file_size < 4 * 10**6


def test_an_index_takes_both(built: Path) -> None:
    """Metadata is whole, and the long description is one that an index can show."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_can_get_a_manylinux_tag(wheel_path: Path, wheel: zipfile.ZipFile) -> None:
    """The compiled parts need nothing but the C and C++ libraries of the system, which is what auditwheel asks for."""
    if not [name for name in wheel.namelist() if Path(name).suffix == ".so"]:
        pytest.skip("nothing was compiled here: `moe-ckpt doctor` says why")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"manylinux_2_\d+_\w+", done.stdout), done.stdout


def test_links_of_the_long_description_lead_somewhere() -> None:
    """Absolute where the release has an address, and none where it has none: an index has no files beside the text."""
    made = runpy.run_path(str(ROOT / "ext" / "build_metadata.py"))
    long_description, project_urls = made["long_description"], made["project_urls"]
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = long_description(readme, "https://host.example/owner/name/blob/v1/")
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", readme))
    assert all(link.startswith("https://") for link in links)
    assert "(https://host.example/owner/name/raw/v1/docs/images/demo.png)" in shown
    assert "](" not in long_description(readme, None)
    assert project_urls(None) == {}
    assert project_urls("https://host.example/owner/name/blob/v1")["Repository"] == "https://host.example/owner/name"


def test_a_command_without_its_extra_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sentence, with status 2; rich is no dependency, since Lightning would take its progress bar."""
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.inspection.commands", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["doctor"]) == 2
    assert "pip install rich, or the extra `tools`" in capsys.readouterr().err


def test_source_archive_holds_what_the_wheel_is_built_from(built: Path) -> None:
    """Someone without a wheel for their platform compiles from it."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ext").rglob("*") if path.is_file()}
    assert {name for name in sources if "__pycache__" not in name} | {"setup.py"} <= names
    assert not [name for name in names if Path(name).suffix in COMPILED]


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """A sub-package missing from the list in pyproject.toml, or a file that is no package data, shows here."""
    expected = _contents(ROOT / PACKAGE, PACKAGE) | _contents(ROOT / "callbacks", f"{PACKAGE}/callbacks")
    names = [name for name in wheel.namelist() if name.startswith(f"{PACKAGE}/") and Path(name).suffix not in COMPILED]
    assert sorted(names) == sorted(expected)
    assert {name: wheel.read(name) for name in names} == expected


def test_wheel_holds_the_format_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    """FORMAT.md describes the bytes on disk and py.typed turns on type checks: both must reach the user."""
    assert {f"{PACKAGE}/py.typed", f"{PACKAGE}/FORMAT.md"} <= set(wheel.namelist())


def test_callbacks_is_packaged_once(wheel: zipfile.ZipFile) -> None:
    """A top-level `callbacks` would be a second copy of every class."""
    assert f"{PACKAGE}/callbacks/__init__.py" in wheel.namelist()
    assert not [name for name in wheel.namelist() if name.startswith("callbacks")]


def test_link_for_type_checkers_leads_to_callbacks() -> None:
    """mypy and editors find `lightning_moe_ckpt.callbacks` through the link; packaging does not need it."""
    assert (ROOT / PACKAGE / "callbacks").resolve() == ROOT / "callbacks"


def test_every_dependency_is_pinned_for_make() -> None:
    """What pyproject.toml names stands in constraints.txt with one exact version."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib is part of Python from 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    pinned = re.findall(r"^([a-z0-9-]+)==[0-9][^ *\n]*(?: ;.*)?$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pinned) == len(set(pinned))
    assert {re.split(r"[\[<>=~!; ]", name)[0] for name in named} <= set(pinned)


@pytest.mark.parametrize("name", ["Makefile", "constraints.txt", ".ci/run", "setup.cfg"])
def test_set_up_names_no_host(name: str) -> None:
    """Where packages come from is the user's setting, not ours."""
    assert not re.search(r"://|--(extra-)?index-url|--find-links|-f ", (ROOT / name).read_text())


def test_changelog_has_an_entry_for_this_version() -> None:
    """A release that the changelog does not mention is a release nobody can judge."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib is part of Python from 3.11")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
