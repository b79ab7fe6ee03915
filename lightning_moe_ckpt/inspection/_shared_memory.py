"""List the files of runs in shared memory, bring a run's generations to storage, clear files without a process, and show a forecast.

Shared memory outlives its process on purpose: a rank that is started again resumes from there. So no file is called useless.
The list says how new each file is and whether a process holds it, and files are removed only if the user asks.

If nobody starts again, memory is lost with its node. `Flush` does the next work of the ended processes' storage tier, under
their incarnation's name: every node brings its ranks' parts, and all commit alike.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from lightning_moe_ckpt._units import size_text, time_text
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyMissing, StorageError
from lightning_moe_ckpt.inspection._answers import Answer, plain_table
from lightning_moe_ckpt.inspection._assemble import constants_of
from lightning_moe_ckpt.inspection._verify import disagreements
from lightning_moe_ckpt.recovery import Version
from lightning_moe_ckpt.snapshot import PlanRecord
from lightning_moe_ckpt.storage import (
    Backend,
    RankMarker,
    ReferencedEntry,
    RunStore,
    carry_forward,
    carry_spares,
    digest_of,
    full_records,
    segment_key,
)
from lightning_moe_ckpt.storage._catalog import Contents, missing_objects, read_marker
from lightning_moe_ckpt.storage._names import RECEIPTS
from lightning_moe_ckpt.tiers import Holding, HostTier, is_differential, is_partial, shared_directory
from lightning_moe_ckpt.tiers._shm import close_shared, memory_files, open_shared

_NAME = re.compile(
    r"(?P<memory>moe-ckpt-(?P<uid>\d+)-(?P<tag>[A-Za-z0-9_.-]{1,100})-(?P<rank>\d+)(?:\.\d+)?\.(?P<kind>ring|replica))"
    r"(?:\.(?P<step>\d+)\.i\d+(?:-[0-9a-f]{12})?\.(?:done|tmp))?"
)
_PREFIX = "moe-ckpt-"
_LOCK = "hhqqi"
"""`struct flock` of Linux: type, whence, start, length, process."""
_SETTLED_SECONDS = 3600.0
"""How long a benchmark's folder must be unchanged to count as left: between two fits no process holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """Files in shared memory that belong together, in use or not: a ring or replica with its markers, markers alone, or a folder."""

    path: str
    what: str
    """`ring`, `replica`, `markers` of memory that is gone, or `folder` of a benchmark."""
    owner: str
    tag: str
    """Tag of the run at its place; empty for a folder."""
    rank: int | None
    step: int | None
    """Step of the newest generation in the memory."""
    nbytes: int
    age_seconds: float
    """Seconds since the last change."""
    held_by: tuple[int, ...]
    """Processes with a lock on, a descriptor or a mapping of the files; 0 for a process in another container."""
    files: tuple[str, ...]
    why_kept: str = ""
    """Why `--clear` leaves the files without `--force`; empty if it removes them."""


def answer(*, tag: str | None, clear: bool, force: bool, dry_run: bool) -> Answer:
    """List, and clear if asked to, this node's shared memory of the run `tag` or of all; `force` also removes files held by a process."""
    directory = shared_directory()
    found = [leftover for leftover in leftovers(directory) if tag in (None, leftover.tag)]
    goes = [each for each in found if clear and (force or not each.why_kept)]
    cleared = [generation for generation in goes if not dry_run and _remove(generation)]
    gone = {"cleared": [each.path for each in cleared], "would_clear": [each.path for each in goes] if dry_run else []}
    document = {"directory": str(directory), "found": [asdict(each) for each in found], **gone}
    failed = 0 if dry_run else len(goes) - len(cleared)
    return Answer(document, lambda: _tables(directory, found, goes, clear=clear, dry_run=dry_run), 2 if failed else 0)


def leftovers(directory: Path, pattern: str = "*") -> list[Leftover]:
    """Return the files whose name, behind the package's own part, matches the pattern, by run and rank."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(directory.glob(f"{_PREFIX}{pattern}")):
        match = _NAME.fullmatch(path.name)
        groups.setdefault(match["memory"] if match else path.name, []).append(path)
    holders = _Holders(directory)
    return [each for name, paths in groups.items() if (each := _look(name, paths, holders)) is not None]


def _look(name: str, paths: Sequence[Path], holders: _Holders) -> Leftover | None:
    everything = [path for each in paths for path in (each, *(each.rglob("*") if each.is_dir() else ()))]
    statuses = list[os.stat_result]()
    for path in everything:
        with suppress(FileNotFoundError):  # removed meanwhile
            statuses.append(path.lstat())
    if not statuses:
        return None
    match = _NAME.fullmatch(name)
    memory = paths[0].with_name(name)
    steps = [int(found["step"]) for path in paths if (found := _NAME.fullmatch(path.name)) and found["step"]]
    what = "folder" if match is None else match["kind"] if memory in paths else "markers"
    held = tuple(sorted(holders.of(everything)))
    age = max(0.0, time.time() - max(status.st_mtime for status in statuses))
    return Leftover(
        path=str(memory),
        what=what,
        owner=_user(statuses[0].st_uid),
        tag="" if match is None else match["tag"],
        rank=None if match is None else int(match["rank"]),
        step=max(steps, default=None),
        nbytes=sum(status.st_size for status in statuses),
        age_seconds=round(age, 1),
        held_by=held,
        files=tuple(map(str, paths)),
        why_kept=_why_kept(statuses[0].st_uid, held, what, age),
    )


def _why_kept(uid: int, held: Sequence[int], what: str, age: float) -> str:
    if uid != os.geteuid() and os.geteuid() != 0:
        return "another user's"
    if held:
        return f"process {', '.join(map(str, filter(None, held))) or 'of another container'}"
    if what == "folder" and age < _SETTLED_SECONDS:
        return "perhaps a benchmark"
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class _Holders:
    """Processes by the files of a directory that they have locked, open or mapped."""

    def __init__(self, directory: Path) -> None:
        self._pids: dict[str, set[int]] = {}
        for process in Path("/proc").glob("[0-9]*"):
            for path in _paths_of(process):
                if path.startswith(f"{directory}/{_PREFIX}"):
                    self._pids.setdefault(path, set()).add(int(process.name))

    def of(self, paths: Iterable[Path]) -> set[int]:
        found = set[int]()
        for path in paths:
            found |= self._pids.get(str(path), set())
            if path.suffix in {".ring", ".replica"} and (pid := _locked_by(path)) is not None:
                found.add(pid)
        return found


def _paths_of(process: Path) -> Iterator[str]:
    """Yield the open and mapped files of a process, as far as this user may see them."""
    try:
        for line in (process / "maps").read_text().splitlines():
            if _PREFIX in line:
                yield line.split(maxsplit=5)[-1]
        for link in (process / "fd").iterdir():
            yield str(link.readlink())
    except OSError:  # it has ended meanwhile, or is another user's
        return


def _locked_by(path: Path) -> int | None:
    """Return the process that has locked a file; 0 for a process in another container; `None` without a lock."""
    try:
        descriptor = open_shared(path)
    except OSError:  # another user's
        return None
    try:
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_LOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        close_shared(descriptor)  # of a file that this process owns later: closing would lose its lock
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def _remove(each: Leftover) -> bool:
    """Remove the files, markers first: markers are useless without their memory. Return whether all files are gone."""
    for name in sorted(each.files, key=len, reverse=True):
        path = Path(name)
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError:
            return False
    return True


def _tables(
    directory: Path, found: Sequence[Leftover], goes: Sequence[Leftover], *, clear: bool, dry_run: bool
) -> list[RenderableType]:
    if not found:
        return [f"nothing of lightning_moe_ckpt is in {directory}"]
    titles = ("run", "rank", "what", "step", "size", "age", "held by", ("fate" if clear else "owner"))
    table = plain_table(*titles, right=("rank", "step", "size", "age"), wraps="held by")
    for each in found:
        run = each.tag[:8] or Path(each.path).name.removeprefix(_PREFIX)
        rank, step = ("-" if number is None else str(number) for number in (each.rank, each.step))
        held = each.why_kept.replace("process ", "pid ") or "nobody"
        fate = _fate(each, goes, dry_run=dry_run) if clear else each.owner
        table.add_row(run, rank, each.what, step, size_text(each.nbytes), time_text(each.age_seconds), held, fate)
    free = [each for each in found if not each.why_kept]
    said = (
        f"{len(found)} in {directory}, {_sum(found)}; {len(free)} held by nobody, {_sum(free)}. A run that is started again "
        "resumes from its memory."
    )
    if free and not clear:
        said += (
            " `moe-ckpt shm URL --clear` removes what the run at a URL has, if nobody holds it; without URL, also what runs have that "
            "wait to be started again."
        )
    return [table, said]


def _fate(each: Leftover, goes: Sequence[Leftover], *, dry_run: bool) -> str:
    if each not in goes:
        return "stays"
    if dry_run:
        return "would go"
    return "could not be removed" if any(os.path.lexists(name) for name in each.files) else "removed"


def _sum(those: Sequence[Leftover]) -> str:
    return size_text(sum(each.nbytes for each in those))


def forecast_answer(found: Mapping[str, Any], ranks: int) -> Answer:
    """Show a rank's memory, from `forecast`, and its node's."""
    parts = found["purposes"]
    node = {number: ranks * sum(each.values()) for number, each in parts.items()}

    def tables() -> list[RenderableType]:
        titles = [f"memory_generations={number}" for number in node]
        table = plain_table("shared memory", *titles, right=titles)
        for purpose in max(parts.values(), key=len):
            table.add_row(purpose, *(size_text(each.get(purpose, 0)) for each in parts.values()))
        table.add_row("a rank", *(size_text(sum(each.values())) for each in parts.values()))
        table.add_row(f"a node of {ranks} ranks", *map(size_text, node.values()))
        text = {name: size_text(found[name]) for name in ("full", "generation", "journals", "captured")}
        least, *more = [1 + int(1.02 * nbytes / 2**30) for nbytes in node.values()]  # markers take up to a fiftieth
        said = f"full state of a rank: {text['full']}; a generation: {text['generation']} in a window of {found['window']}, with "
        said += f"{text['journals']} of journals and {text['captured']} captured for other ranks"
        limits = f"a node needs {least} GiB of shared memory, within its memory limit (`--shm-size={least}g`; `sizeLimit: {least}Gi`)"
        auto = [f"memory_generations='auto' takes 3 where {2 * each} GiB are free, else 2" for each in more]
        return [said, table, limits, *auto]

    return Answer({**found, "node": node}, tables)


# -- to storage

_AT_ONCE = 4
"""Ranks whose parts are read and written at the same time; each takes memory for one file."""
_SKEW_SECONDS = 5.0
"""Seconds until nodes stop waiting for each other, and bring an older generation too."""


class Flush:
    """Store the newest whole generation in this node's memory of a run that has ended; memory stays as it is.

    `wait` is for other nodes' parts of the same generation; `say` gets a sentence before bytes are written.
    """

    def __init__(self, backend: Backend, *, wait: timedelta, say: Callable[[str], object]) -> None:
        self._backend, self._wait, self._say = backend, wait, say
        self._store = RunStore.of_ended(backend)
        self._memory = HostTier(self._store.memory_tag)
        self._newest = next(iter(self._store.candidates()), None)
        """Newest commit."""
        self._parts: dict[Version, dict[int, list[Holding]]] = {}
        """Whole copies by version and rank, the best first."""

    def answer(self) -> Answer:
        """Bring what is newer than storage. Raises `ConfigurationError` if the run lives here, `Fenced` if it lives again."""
        self._take_stock()
        said, reasons = list[str](), dict[Version, str]()
        # A sure one first: what is not whole here may never become so. Others, on this node and elsewhere, once parts are there.
        late = sorted(self._parts, key=lambda each: (not self._lacking(each), each), reverse=True)
        for seconds in (_SKEW_SECONDS, self._wait.total_seconds()):
            turn, late = late, []
            for version in filter(self._is_newer, turn):
                try:
                    self._bring(version, said, timedelta(seconds=seconds))
                except (Corrupt, TimeoutError) as error:  # noqa: PERF203  # an older one may be whole
                    reasons[version] = f"not stored: {version.generation}: {error}"
                    late += [version] * isinstance(error, TimeoutError)
        self._memory.close()
        newest = "nothing" if self._newest is None else str(self._newest.generation)
        missed = [reason for version, reason in reasons.items() if self._is_newer(version)]
        lines = [*said, *missed] or [f"nothing to do: storage has {newest}, memory of this node nothing newer"]
        return Answer({"newest": newest, "said": said, "missed": missed}, lambda: lines, int(bool(missed)))

    def _is_newer(self, version: Version) -> bool:
        return self._newest is None or version.generation.step > self._newest.generation.step

    def _take_stock(self) -> None:
        tag = self._store.memory_tag
        files = [path for path, name in memory_files(shared_directory(), tag) if name.tag == tag]
        if held := sorted({pid for path in files if (pid := _locked_by(path)) is not None}):
            raise ConfigurationError(
                f"{self._store.url}: process {', '.join(map(str, held))} (0: of another container) holds memory of this run, and stores "
                "by itself as long as it lives. End it by SIGTERM, with which it stores all it has, and flush what is left."
            )
        for each in sorted(self._memory.holdings(), key=lambda each: (not each.exact, ".ring" not in each.file)):
            why = self._store.why_dead(each.generation) or self._store.why_foreign(each.generation, each.seen)
            if each.whole and why is None:
                owners = self._parts.setdefault(Version(each.generation, each.plan_hash), {})
                owners.setdefault(each.owner, []).append(each)

    def _lacking(self, version: Version) -> set[int]:
        """Return the ranks whose part is neither in this memory nor in storage."""
        owners = self._parts[version]
        size = next(copies[0].world_size for copies in owners.values())
        return {*range(size)} - {*owners} - Contents(version.generation, self._backend).ranks

    def _bring(self, version: Version, said: list[str], wait: timedelta) -> None:
        """Bring this node's parts of a version, commit with the parts of all ranks, and add a sentence to `said`.

        Raises `Corrupt` if a part is bad in every copy, and `TimeoutError` if other ranks' parts did not come.
        """
        began, generation = time.monotonic(), version.generation
        line = [each for each in self._parts if replace(each.generation, step=generation.step) == generation]
        own = {rank for each in line for rank, (copy, *_) in self._parts[each].items() if ".ring" in copy.file}
        if lost := own & self._lacking(version):
            said.append(f"{generation} is left out: rank {min(lost)}, whose memory is here, had not finished it")
            return
        chain, ranks = self._chain(version), self._parts[version]
        if chain[0] != version and not self._is_link(chain[0]):
            self._bring(chain.pop(0), said, wait)
        if any(rank not in self._parts[each] for each in chain for rank in ranks):
            raise Corrupt("a rank lacks a step before it.")
        size = size_text(sum(self._parts[each][rank][0].nbytes for each in chain for rank in ranks))
        self._say(f"{generation}: {size} of ranks {', '.join(map(str, sorted(ranks)))} go to {self._store.url}")
        with ThreadPoolExecutor(_AT_ONCE, "moe-ckpt-flush") as pool:
            markers = list(pool.map(partial(self._bring_part, chain), ranks))
        try:
            self._newest = self._store.commit_ended(
                markers[0],
                timeout=min(wait, self._wait),
                check=lambda found: disagreements(found, constants_of(self._backend, found[0].policy)),
            )
        except StorageError as error:
            if len(Contents(generation, self._backend).ranks) == markers[0].world_size:
                raise
            raise TimeoutError(f"{error} Flush on the nodes of those ranks too.") from error
        said.append(f"{generation} of run {self._store.run_id} is stored: {size} in {time.monotonic() - began:.1f} s")

    def _is_link(self, version: Version) -> bool:
        """Return whether a version is a difference to the step before."""
        return is_differential(self._memory.read_marker(next(iter(self._parts[version].values()))[0]).policy)

    def _chain(self, version: Version) -> list[Version]:
        """Return the versions from a full state, or from behind the newest commit, up to this version, oldest first."""
        versions, chain = {each.generation: each for each in self._parts}, [version]
        while self._is_link(chain[0]):
            before = replace(chain[0].generation, step=chain[0].generation.step - 1)
            if self._newest is not None and before == self._newest.generation:
                break
            if before not in versions:
                raise Corrupt(f"it follows on {before}, which is neither in memory nor in storage.")
            chain.insert(0, versions[before])
        return chain

    def _bring_part(self, chain: Sequence[Version], rank: int) -> RankMarker:
        """Store a rank's part from good copies, and return its marker in storage."""
        contents, reasons = Contents(chain[-1].generation, self._backend), ""
        held = [self._parts[each][rank] for each in chain]
        for turn in range(max(map(len, held))):
            try:
                return self._put(contents, [copies[min(turn, len(copies) - 1)] for copies in held])
            except (Corrupt, KeyMissing) as error:  # noqa: PERF203  # another copy may be good
                reasons += f" {error}"
        raise Corrupt(f"rank {rank}:{reasons}")

    def _put(self, contents: Contents, copies: Sequence[Holding]) -> RankMarker:
        """Store a part in the form of storage: of a difference all steps in a single generation, else durable files."""
        generation, rank, marker = contents.generation, copies[0].owner, self._memory.read_marker(copies[-1])
        found = [(copy, file) for copy in copies for file in self._memory.read_marker(copy).segments]
        found = [(copy, file) for copy, file in found if file.key == segment_key(copy.generation, rank, file.step)]
        files = [replace(file, key=segment_key(generation, rank, file.step)) for _, file in found]
        marker = self._referring(replace(marker, segments=tuple(files)))
        if rank in contents.ranks:  # its process was faster, or another node
            known = read_marker(self._backend, generation, rank).marker
            if (known.plan_hash, known.referenced) != (marker.plan_hash, marker.referenced):
                raise Corrupt("its marker in storage refers to other files.")
            if not missing_objects(known, contents):
                return known
        for copy, file in found:
            key = segment_key(generation, rank, file.step)
            if not copy.exact or contents.sizes.get(key) != file.nbytes:
                data = memoryview(np.empty(file.nbytes, np.uint8))  # type: ignore[arg-type]  # numpy's stubs
                self._memory.read_into(copy, file, 0, data)
                if digest_of(data) != file.digest:
                    raise Corrupt(f"{copy.file} has other bytes of step {file.step} than its marker says.")
                self._store.put_segment(generation, rank, file.step, data)
        # Never a receipt of another marker, even if this process is killed now.
        self._backend.delete(*(key for key in contents.sizes if f"/{RECEIPTS}{rank:05d}." in key))
        self._store.put_marker(marker)
        return marker

    def _referring(self, marker: RankMarker) -> RankMarker:
        """Return the marker with references to files of the newest commit. Raises `Corrupt` if that completes no partial one."""
        newest, is_link, partial = self._newest, is_differential(marker.policy), is_partial(marker.policy)
        fits = newest is not None and newest.world_size == marker.world_size
        if partial and not (fits and newest is not None and len(newest.steps) == 1):
            raise Corrupt("it has only some experts, and storage has no generation of these ranks with the others.")
        if newest is None or not fits or not (is_link or partial):
            return marker
        older = self._store.read_marker(newest, marker.rank)
        if is_link:
            last = [ReferencedEntry(generation=newest.generation, segment=each) for each in older.segments]
            return replace(marker, referenced=(*older.referenced, *last))
        plan = PlanRecord.from_json(str(marker.policy["plan"])).plan
        lacks = {record.operator for _, record in full_records(older)}.difference(plan.steps[0].files["durable"])
        if not lacks:
            return marker
        return replace(marker, referenced=carry_forward(older, lacks), spares=carry_spares(older, lacks, ()))
